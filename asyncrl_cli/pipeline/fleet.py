"""The actors of a run: engines, trainer ranks, scorer. Started together, because each takes seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl_cli.pipeline.remote import wait_for
from asyncrl_cli.runs.directory import RunError
from asyncrl_cli.spec.sections import ExperimentSpec

START_TIMEOUT_S = 600.0
"""Seconds that one actor may take for one part of its start."""

Progress = Callable[[str], None]


@dataclass(slots=True)
class Fleet:
    """Handles of the actors by name; the names are those of the log files."""

    spec: ExperimentSpec
    engines: list[tuple[str, Any]]
    trainers: list[tuple[str, Any]]
    scorer: tuple[str, Any]

    @classmethod
    def create(cls, spec: ExperimentSpec, log_dir: Path, search_path: Path) -> Fleet:
        """Ask Ray for all actors; returns at once."""
        import ray

        from asyncrl_cli.rollout.engine import engine_environment
        from asyncrl_cli.rollout.worker import RolloutWorker
        from asyncrl_cli.tasks.scorer import Scorer
        from asyncrl_cli.train.deepspeed_engine import trainer_environment
        from asyncrl_cli.train.worker import TrainerWorker

        logs = str(log_dir)
        rollout, trainer = spec.rollout, spec.trainer
        engine_actor = ray.remote(RolloutWorker).options(
            num_cpus=rollout.threads_per_engine,
            num_gpus=rollout.gpus_per_engine,
            runtime_env={"env_vars": engine_environment(spec)},
        )
        trainer_actor = ray.remote(concurrency_groups={"watch": 1})(TrainerWorker).options(
            num_cpus=trainer.threads_per_rank,
            num_gpus=trainer.gpus_per_rank,
            runtime_env={"env_vars": trainer_environment(spec)},
        )
        engine_names = [f"engine-{index}" for index in range(rollout.engines)]
        return cls(
            spec,
            [(name, engine_actor.remote(name, spec, logs)) for name in engine_names],
            [(f"trainer-{rank}", trainer_actor.remote(rank, spec, logs)) for rank in range(trainer.ranks)],
            ("scorer", ray.remote(Scorer).options(num_cpus=0).remote(spec.task, str(search_path), logs)),
        )

    async def start(
        self, skeleton: Callable[[], Path], search_path: Path, checkpoint: Path | None, progress: Progress
    ) -> str:
        """Bring everything up; returns the initial model's folder.

        Engines start from the model's skeleton while rank 0 makes its weights. Raises ``RunError`` that names
        the actor that failed.
        """
        progress("starting engines and trainer")
        preloading = asyncio.gather(*(self._call(actor, "preload") for actor in (*self.trainers, *self.engines)))
        scorer = asyncio.ensure_future(self._call(self.scorer, "start"))
        folder = await asyncio.to_thread(skeleton)
        places = await preloading
        address, port, trainer_node = places[0]
        engines = asyncio.gather(*(self._call(engine, "start", str(folder)) for engine in self.engines))
        try:
            model_dir: str = await self._prepare_model(search_path, progress)
            progress("starting trainer")
            await asyncio.gather(
                *(
                    self._call(trainer, "start", model_dir, address, port, checkpoint and str(checkpoint))
                    for trainer in self.trainers
                ),
                scorer,
            )
            progress("starting engines")
        except BaseException:
            engines.cancel()
            raise
        nodes = await engines
        if any(node != trainer_node for node in nodes):
            raise RunError(
                "an engine runs on another host than trainer rank 0, and weights travel through its memory",
                place="cluster",
                mend="Give the run one host that has room for all engines and trainer rank 0",
            )
        return model_dir

    async def train(self, method: str, *arguments: Any) -> list[Any]:
        """Call all trainer ranks alike; returns their answers. Raises ``RunError`` after ``stall_minutes``."""
        limit = self.spec.pipeline.stall_minutes * 60
        return await asyncio.gather(
            *(self._call(trainer, method, *arguments, timeout_s=limit) for trainer in self.trainers)
        )

    async def stop(self) -> None:
        """Let the engines stop their processes; whatever is left dies with the cluster."""
        await asyncio.gather(
            *(self._call(engine, "stop", timeout_s=5.0) for engine in self.engines), return_exceptions=True
        )

    async def _prepare_model(self, search_path: Path, progress: Progress) -> Any:
        name, rank_0 = self.trainers[0]
        making = asyncio.ensure_future(wait_for(rank_0.prepare_model.remote(str(search_path)), name))
        while not making.done():
            done, total, loss = await wait_for(
                rank_0.progress.options(concurrency_group="watch").remote(), name, START_TIMEOUT_S
            )
            if total:
                progress(f"warm start: {done} of {total} updates, loss {loss:.3f}")
            await asyncio.wait([making], timeout=0.5)
        return making.result()

    async def _call(
        self, actor: tuple[str, Any], method: str, *arguments: Any, timeout_s: float | None = START_TIMEOUT_S
    ) -> Any:
        name, handle = actor
        return await wait_for(getattr(handle, method).remote(*arguments), name, timeout_s)
