"""The trainer ranks as a unit: they start together, get the same calls, and fail together.

A collective operation needs all its ranks, so when one dies, all are lost (``TrainerLost``). A restart loads a
checkpoint into all ranks; the caller then trains the steps since the checkpoint again.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator.placement import PlacementGroup, rank_order
from asyncrl_cli.records.training import Probe, RankLocation, StepReport, SupervisedBatch, TrainingBatch
from asyncrl_cli.runs.checkpoints import Digest
from asyncrl_cli.system.remote import START_TIMEOUT_S, ActorDied, NoAnswer, seconds_for, wait_for, wait_for_head
from asyncrl_cli.train.worker import FullGpu
from asyncrl_cli.weights.layout import TensorSlot

GRACE_S = 20.0
"""Seconds that the other ranks get to end a call after one rank has failed."""
LONGEST_LOOK_S = 5.0
"""Longest time in seconds between two checks whether a step's ranks work."""
WATCHING, WRITING = "watch", "write"
"""Ray's concurrency groups of a rank: calls that are answered while another call runs."""
STATES = 8
"""Bytes of a checkpoint for each byte of a bfloat16 model: weights, their float32 copies and Adam's moments, rounded
up."""


class TrainerLost(Exception):
    """A rank died, so all ranks have to be restarted."""

    def __init__(self, name: str, cause: str) -> None:
        super().__init__(f"{name}: {cause}")
        self.name = name
        self.cause = cause


def _put(batch: TrainingBatch | SupervisedBatch) -> Any:
    import ray

    return ray.put(batch)


@dataclass(eq=False)
class TrainerRanks:
    """All ranks of a run's trainer."""

    make_actor: Callable[[PlacementGroup, int], Any]
    """Creates an actor in the bundle of ``group`` with this index."""
    group: PlacementGroup
    search_path: Path
    limit_s: float
    """Seconds that a call may take, or that a step may go without progress."""
    warn: Callable[[str], None]
    """Gets a text about missing resources while Ray has no room."""
    share: Callable[[TrainingBatch | SupervisedBatch], Any] = _put
    """Stores a batch once for all ranks; returns what their calls get."""
    locations: tuple[RankLocation, ...] = ()
    """Each rank's location, in rank order; empty before ``preload``."""
    probe_prompt_ids: tuple[int, ...] = ()
    """Token ids of the task's prompts for the probe; empty if prompts have no token ids."""
    _actors: list[Any] = field(default_factory=list)
    _model_dir: str = ""
    _model_bytes: int = 0

    @property
    def nodes(self) -> tuple[str, ...]:
        """Ray's node id of each rank, in rank order."""
        return tuple(location.node_id for location in self.locations)

    @property
    def saving_s(self) -> float:
        """Seconds that a checkpoint's size adds to the limit of the call that saves it."""
        return seconds_for(STATES * self._model_bytes)

    async def preload(self) -> None:
        """End the remaining ranks, create and number new ones, and have them import the modules that ``start`` needs.

        Raises ``TrainerLost``, and ``RunError`` when Ray finds no room for them.
        """
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        await self.group.wait_for_room(self.warn)
        await wait_for_head()
        self._actors = actors = [self.make_actor(self.group, index) for index in range(self.group.count)]
        visits = _all([actor.visit.remote(str(self.search_path)) for actor in actors], START_TIMEOUT_S)
        locations = await self.group.first_answer(visits, self.warn)
        order = rank_order(locations)
        self._actors, self.locations = [actors[index] for index in order], tuple(locations[index] for index in order)
        one_host = len({location.node_id for location in locations}) == 1
        calls = [actor.preload.remote(rank, one_host) for rank, actor in enumerate(self._actors)]
        self._address, self._port = (await _all(calls, START_TIMEOUT_S))[0]

    async def prepare_model(self) -> str:
        """Have rank 0 make the initial model if necessary; returns its folder. Raises ``TrainerLost``."""
        (folder,) = await _all([self._actors[0].prepare_model.remote()], START_TIMEOUT_S)
        self._model_dir = str(folder)
        return self._model_dir

    async def start(self, checkpoint: Path | None) -> None:
        """Load the initial model, and then the checkpoint if there is one."""
        folder = checkpoint and str(checkpoint)
        self._model_bytes = await asyncio.to_thread(weight_bytes, self._model_dir)
        # Time for the policy, a reference or critic, and the optimizer's states of a checkpoint.
        seconds = seconds_for(2 * self._model_bytes) + (self.saving_s if checkpoint else 0.0)
        await self._call(
            "start",
            self._model_dir,
            self._address,
            self._port,
            folder,
            str(self.search_path),
            limit_s=START_TIMEOUT_S + seconds,
        )

    async def restart(self, checkpoint: Path | None) -> None:
        """End the remaining ranks, and start all of them from a checkpoint, or from the initial model."""
        await self.preload()
        await self.start(checkpoint)

    async def check(self) -> None:
        """Raise ``TrainerLost`` if a rank is dead."""
        await _all([_look_at(actor) for actor in self._actors], self.limit_s)

    async def train_step(self, batch: TrainingBatch, progress: Callable[[], None] = lambda: None) -> StepReport:
        """Train one batch. ``progress`` is called while ranks finish micro-batches.

        This and the calls below raise ``TrainerLost`` if a rank died, otherwise a rank's error.
        """
        reports = await self._step("train_step", batch, progress)
        peaks = [report.peak_flops for report in reports]
        return replace(reports[0], peak_flops=None if None in peaks else sum(filter(None, peaks)))

    async def supervised_step(self, batch: SupervisedBatch) -> StepReport:
        """Make one supervised update."""
        return (await self._step("supervised_step", batch))[0]

    async def layout(self) -> tuple[TensorSlot, ...]:
        """The layout of the weights that engines get."""
        layout: tuple[TensorSlot, ...] = (await self._call("layout"))[0]
        return layout

    async def write(self, version: int, paths: Sequence[str]) -> Probe:
        """Have each rank write its shard into the memory at its path; ``paths`` are in rank order.

        Returns rank 0's probe. Raises ``ReplicaGone`` when a rank does not find its memory.
        """
        probe: Probe = (await self._call("write", version, paths, self.probe_prompt_ids))[0]
        return probe

    async def save_checkpoint(self, folder: Path) -> None:
        """Copy every rank's state for ``write_checkpoint``. Training may continue afterwards."""
        sharers = max(Counter(self.nodes).values())
        await self._call("save_checkpoint", str(folder), sharers, limit_s=self.limit_s + self.saving_s)

    async def write_checkpoint(self, folder: Path) -> dict[str, Digest]:
        """Write the copied states, while the ranks may train; returns the large files' checksums by their path."""
        rank_digests: list[dict[str, Digest]] = await self._call(
            "write_checkpoint", str(folder), limit_s=self.limit_s + self.saving_s, group=WRITING
        )
        return {path: digest for files in rank_digests for path, digest in files.items()}

    async def save_model(self, folder: Path, adapter_folder: Path) -> None:
        """Write the weights as a Hugging Face model, and its adapters, if any, to ``adapter_folder``."""
        await self._call(
            "save_model", str(folder), str(adapter_folder), limit_s=self.limit_s + seconds_for(2 * self._model_bytes)
        )

    async def _step(
        self, method: str, batch: TrainingBatch | SupervisedBatch, progress: Callable[[], None] = lambda: None
    ) -> list[StepReport]:
        # Stored once, in a thread: Ray would pickle an argument once for each rank, in the driver's event loop.
        shared = await asyncio.to_thread(self.share, batch)
        try:
            async with asyncio.timeout(self.limit_s) as limit:
                watching = asyncio.create_task(self._watch_step(limit, progress))
                try:
                    return await self._call(method, shared, limit_s=math.inf)
                finally:
                    watching.cancel()
        except TimeoutError:
            raise NoAnswer(
                f"no rank has finished a micro-batch within {self.limit_s:.0f} s",
                location="trainer-0",
                hint="see logs/trainer-0.log in the run's folder",
            ) from None

    async def _watch_step(self, limit: asyncio.Timeout, progress: Callable[[], None]) -> None:
        """Restart a step's ``limit`` whenever a rank has finished further micro-batches."""
        counts: list[int] = []
        with suppress(TrainerLost, RunError):  # the step's own call raises the error
            while True:
                await asyncio.sleep(min(LONGEST_LOOK_S, self.limit_s / 16))
                previous_counts = counts
                counts = await _all([_look_at(actor) for actor in self._actors], self.limit_s)
                if previous_counts and counts != previous_counts and not limit.expired():
                    limit.reschedule(asyncio.get_running_loop().time() + self.limit_s)
                    progress()

    async def _call(
        self, method: str, *arguments: Any, limit_s: float | None = None, group: str | None = None
    ) -> list[Any]:
        calls = [getattr(actor, method).options(concurrency_group=group).remote(*arguments) for actor in self._actors]
        return await _all(calls, limit_s or self.limit_s)


def weight_bytes(model: str) -> int:
    """Size in bytes of the weights of a model, given as folder or hub id; 0 if this host does not have them."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(model)
    if not folder.is_dir():
        try:
            config = try_to_load_from_cache(model, "config.json")
        except ValueError:  # a folder that this host does not have
            return 0
        folder = Path(config).parent if isinstance(config, str) else folder
    # A folder may have the weights in both formats; transformers loads the first.
    sizes = (sum(file.stat().st_size for file in folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))
    return next(filter(None, sizes), 0)


def _look_at(actor: Any) -> Awaitable[Any]:
    """A call that a rank answers even while another call runs."""
    answer: Awaitable[Any] = actor.ping.options(concurrency_group=WATCHING).remote()
    return answer


async def _all(remote_calls: Sequence[Awaitable[Any]], limit_s: float) -> list[Any]:
    """The answers of all ranks to one call, in rank order. Raises like ``TrainerRanks.train_step``."""
    calls = [
        asyncio.ensure_future(wait_for(call, f"trainer-{rank}", limit_s)) for rank, call in enumerate(remote_calls)
    ]
    try:
        completed_calls, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if waiting and not any(isinstance(call.exception(), ActorDied | FullGpu) for call in completed_calls):
            # A rank may report its peer's death as its own error before Ray reports it to us: the death is the cause.
            completed_calls, _ = await asyncio.wait(calls, timeout=GRACE_S)
    finally:
        for call in calls:
            call.cancel()
    errors = [error for call in completed_calls if (error := call.exception()) is not None]
    for error in errors:
        if isinstance(error, ActorDied):
            raise TrainerLost(error.location, error.message)
    if errors:
        raise next((error for error in errors if isinstance(error, FullGpu)), errors[0])
    return [call.result() for call in calls]
