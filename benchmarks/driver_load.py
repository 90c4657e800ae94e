"""How many engines one driver can serve: the load of the driver, with simulated engines.

    python benchmarks/driver_load.py [--engines N ...] [--rate TOKENS_PER_S] [--slots N] [--tokens N] [--seconds S]

Real: client, scheduler, prompts and their encoding, the journal, the actor of rewards, the part of the engines' actors
that reports tokens (``RolloutWorker``), batches to a trainer, versions. Simulated: an engine's tokens, which appear at
``--rate`` tokens/s for ``--slots`` simultaneous requests, in rollouts with exponentially distributed lengths
(``--tokens`` is the mean; the maximum is four times the mean); the trainer, which takes batches but does not train; and
updates of weights, which take no time. Several engines share a process, to save memory.

Figures are measured for ``--seconds`` s after ``--warm-up`` s. CPU seconds are per 1,000 finished rollouts, of all
threads; the driver's include the journal's. Late is the delay of a sleep of 20 ms in the driver's event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import header, row

from asyncrl_cli.data.loader import PromptLoader
from asyncrl_cli.data.prompt_encoder import PromptEncoder
from asyncrl_cli.data.rows import LazyPrompts
from asyncrl_cli.data.tokenizer import character_tokenizer
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.journal.schema import FILE, open_for_reading
from asyncrl_cli.orchestrator.actors import ActorFactory
from asyncrl_cli.orchestrator.prompt_source import PromptSource
from asyncrl_cli.orchestrator.rollout_scheduler import RolloutScheduler
from asyncrl_cli.orchestrator.scoring import Scoring
from asyncrl_cli.records.generation import Placement, Rollout, RolloutRequest, Segment
from asyncrl_cli.records.groups import BufferSettings, Opening, PublishRecord, StepRecord, TakenBatch
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.rollout.activity import Occupancy
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.rollout.continuation import finished, split_by_version
from asyncrl_cli.rollout.worker import RolloutWorker
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.supervised_actor import RestartBudget

GROUP_SIZE = 8
LONGEST = 4
"""The length of the longest rollout, as a multiple of the mean."""
STALENESS = 8
"""In versions; large enough that the slots remain full while a group waits for its longest rollout."""
TEXT = "four" * 2**18
"""Responses are parts of this text, with four characters per token."""
ENGINES_PER_PROCESS = 8
MAX_PROCESSES = 16
"""Of simulated engines; with more of them, a process has more engines."""
LATE_S = 0.02
NEVER_S = 3600.0


def reward(prompt: Mapping[str, Any], response: str) -> float:
    """The task's reward."""
    return float(len(response) // 4 % 2)


# -- engines


@dataclass(slots=True)
class Running:
    """A request in a slot: its length, its start time, and the (version, first token) of its parts."""

    request: RolloutRequest
    tokens: int
    began: float
    versions: list[tuple[int, int]]


class SimulatedEngine:
    """The methods of ``rollout.engine.Engine`` from which a ``RolloutWorker`` reports."""

    dead = False

    def __init__(self, slots: int, rate: float, mean_tokens: int) -> None:
        self._slots = asyncio.Semaphore(slots)
        self._slot_rate = rate / slots
        self._mean_tokens = mean_tokens
        self._running: dict[str, Running] = {}
        self._version = 0
        self._ended_tokens = 0
        self._occupancy = Occupancy()
        self._returned: list[tuple[str, float, float]] = []
        bits = np.random.default_rng(0)
        self._ids = bits.integers(5, 90, 2 * LONGEST * mean_tokens).astype(np.int32)
        self._logprobs = bits.normal(-1.0, 0.5, len(self._ids)).astype(np.float32)

    async def generate(self, request: RolloutRequest) -> Rollout:
        """A rollout, generated at the speed of a slot."""
        async with self._slots:
            length = np.random.default_rng(request.sampling.seed).exponential(self._mean_tokens)
            tokens = min(max(int(length), request.generated + 1), request.sampling.max_tokens)
            running = Running(request, tokens, time.monotonic(), [(self._version, request.generated)])
            self._running[request.rollout_id] = running
            self._occupancy.add(1)
            try:
                await asyncio.sleep((tokens - request.generated) / self._slot_rate)
            finally:
                self._occupancy.add(-1)
                del self._running[request.rollout_id]
            self._returned.append((request.rollout_id, running.began, time.monotonic()))
        self._ended_tokens += tokens - request.generated
        return finished(request, self._segments(running, tokens, 0), "stop", lambda ids: TEXT[: 4 * len(ids)])

    def segments(self, since: Mapping[str, int]) -> list[Segment]:
        """Like ``Engine.segments``."""
        now = time.monotonic()
        found = [(self._running[name], start) for name, start in since.items() if name in self._running]
        return [one for running, start in found for one in self._segments(running, self._made(running, now), start)]

    def sampled_tokens(self) -> int:
        """Like ``Engine.sampled_tokens``."""
        now = time.monotonic()
        return self._ended_tokens + sum(self._made(one, now) for one in self._running.values())

    def sequence_s(self) -> float:
        """Like ``Engine.sequence_s``."""
        return self._occupancy.take()

    def placements(self) -> list[Placement]:
        """Like ``Engine.placements``."""
        now = time.monotonic()
        returned, self._returned = self._returned, []
        return [Placement(name, now - began, now - ended, 0) for name, began, ended in returned]

    def serve(self, version: int) -> None:
        """Later tokens have this version."""
        now = time.monotonic()
        for one in self._running.values():
            one.versions.append((version, self._made(one, now)))
        self._version = version

    def shutdown(self) -> None:
        """Nothing to do."""

    def _made(self, one: Running, now: float) -> int:
        return min(one.request.generated + int((now - one.began) * self._slot_rate), one.tokens)

    def _segments(self, one: Running, end: int, since: int) -> list[Segment]:
        start = max(since, one.request.generated)
        tokens = slice(start, max(end, start))
        return split_by_version(one.request.rollout_id, start, self._ids[tokens], self._logprobs[tokens], one.versions)


class Worker(RolloutWorker):
    """A rollout worker with a simulated engine."""

    def begin(self, *settings: Any) -> None:
        """Serve version 0."""
        self._engine: Any = SimulatedEngine(*settings)

    async def serve(self, version: int) -> None:
        """Like ``update_weights``, but without loading weights."""
        self._on_pause()
        self._engine.serve(version)
        self._clock.end_update()


class EngineHost:
    """A process with several engines."""

    def __init__(self, count: int, spec: ExperimentSpec, log_folder: str, *settings: Any) -> None:
        self._workers = [Worker("engines", spec, log_folder) for _ in range(count)]
        for worker in self._workers:
            worker.begin(*settings)

    async def call(self, index: int, method: str, *arguments: Any) -> Any:
        """Call a method of one of the engines."""
        return await getattr(self._workers[index], method)(*arguments)


class EngineOfHost:
    """One of a host's engines, for the client."""

    def __init__(self, host: Any, index: int, name: str) -> None:
        self.name = name
        self.actor = self
        self._host = host
        self._index = index

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._host.call.remote(self._index, method, *arguments))

    async def lose(self, actor: Any, cause: str) -> None:
        raise RuntimeError(f"{self.name} was lost: {cause}")

    async def running(self) -> Any:
        return self

    def kill(self) -> None:
        raise RuntimeError(f"{self.name} was killed")


class Trainer:
    """Receives batches."""

    def train(self, batch: Any) -> int:
        """Its tokens."""
        return sum(len(rollout.ids) for group in batch.groups for rollout in group.rollouts)


# -- the driver


@dataclass(frozen=True, slots=True)
class Load:
    """The settings of a measurement."""

    rate: float
    slots: int
    tokens: int
    prompt_tokens: int
    seconds: float
    warm_up: float

    def spec(self, engines: int) -> ExperimentSpec:
        """A spec with this many engines; a step has as many groups as run at the same time."""
        text = f"""
            model: {{init: {{architecture: qwen3, config: {{hidden_size: 64}}, tokenizer: characters}},
                     max_length: {self.prompt_tokens + LONGEST * self.tokens}}}
            task: {{use: driver_load:reward}}
            data: {{train: {{size: 100000}}, eval: {{size: 1}}}}
            rollout: {{engines: {engines}, group_size: {GROUP_SIZE}, max_running_rollouts: {self.slots},
                       max_prompt_tokens: {self.prompt_tokens}, max_response_tokens: {LONGEST * self.tokens}}}
            algorithm: {{uniform_groups: train}}
            pipeline: {{max_staleness: {STALENESS}, groups_per_step: {max(1, engines * self.slots // GROUP_SIZE)}}}
            stop: {{steps: 1000000}}
        """
        return load_spec("driver_load.yaml", data=text.encode()).spec


class Measured(Exception):
    """The measurement is over."""


class Driver:
    """The parts of a run's driver that process rollouts, with their actors."""

    def __init__(self, spec: ExperimentSpec, folder: Path, load: Load, buffer: Buffer) -> None:
        import ray

        (folder / "logs").mkdir()
        factory = ActorFactory(spec, folder / "logs", Path(__file__).parent)
        budget = RestartBudget(0, self._no_record, print)
        count = spec.rollout.max_engines
        shared_by = max(ENGINES_PER_PROCESS, math.ceil(count / MAX_PROCESSES))
        hosts = [
            ray.remote(EngineHost)
            .options(num_cpus=0)
            .remote(min(shared_by, count - first), spec, str(folder), load.slots, load.rate, load.tokens)
            for first in range(0, count, shared_by)
        ]
        engines = [
            EngineOfHost(hosts[index // shared_by], index % shared_by, f"engine-{index}") for index in range(count)
        ]
        encoder = PromptEncoder(character_tokenizer(spec.model.max_length), spec.rollout.max_prompt_tokens)
        prompts = LazyPrompts(100_000, lambda row: Prompt(str(row), f"{row} ".ljust(load.prompt_tokens, "?")))
        self._buffer = buffer
        self._scoring = Scoring(spec.task, lambda: factory.scorer(spec.task), budget=budget, task_object=None)
        self._client = GenerationClient(
            engines,
            slots=load.slots,
            retries=0,
            hang_s=NEVER_S,
            decode=encoder.decode,
            on_engine_request=buffer.note_request,
        )
        self._tasks = asyncio.TaskGroup()
        self._scheduler = RolloutScheduler(
            spec,
            buffer=self._buffer,
            client=self._client,
            scoring=self._scoring,
            prompts=PromptSource(PromptLoader(prompts, 0, True), encoder),
            spawn=self._tasks.create_task,
        )
        self._trainer = ray.remote(Trainer).options(num_cpus=0).remote()
        self._journal = folder / FILE
        self._load = load
        self._late: list[float] = []

    async def measure(self, opening: Opening) -> dict[str, float]:
        """Run for the time of warm-up and measurement; returns the results by name."""
        await self._scoring.start()
        try:
            async with self._tasks as tasks:
                for work in (self._scheduler.run(), self._train(opening), self._watch()):
                    tasks.create_task(work)
                await asyncio.sleep(self._load.warm_up)
                counted, used, began = self._counted(), cpu_seconds(), time.monotonic()
                self._late.clear()
                await asyncio.sleep(self._load.seconds)
                seconds, late = time.monotonic() - began, np.percentile(self._late, (50, 99, 100)) * 1e3
                more = {name: value - used[name] for name, value in cpu_seconds().items()}
                done = self._counted() - counted
                raise Measured  # this cancels all tasks
        except* Measured:
            pass
        if not done["rollouts"]:
            raise SystemExit("no rollout ended in the measured time: raise --seconds")
        return {
            "tokens/s": done["tokens"] / seconds,
            "groups/s": done["groups"] / seconds,
            "journal bytes a token": done["bytes"] / done["tokens"],
            **{f"{name} CPU s": 1e3 * value / done["rollouts"] for name, value in more.items()},
            **{f"{name} CPU": value / seconds for name, value in more.items()},
            **dict(zip(("late, median ms", "late, 99th percentile ms", "late, largest ms"), late, strict=True)),
        }

    async def _train(self, opening: Opening) -> None:
        """Take batches and publish versions."""
        import ray

        await self._publish(opening.step)
        for engine in self._client.engines:
            engine.serving = True
            self._tasks.create_task(self._client.collect(engine))
        self._scheduler.resume(opening)
        step = opening.step
        while True:
            taken = await self._buffer.take(step)
            if not isinstance(taken, TakenBatch):
                continue
            batch = await asyncio.to_thread(ray.put, taken.batch)
            await self._trainer.train.remote(batch)
            self._buffer.trained(StepRecord(step, hashlib.sha256(str(step).encode()).hexdigest(), {}))
            step += 1
            await self._publish(step)
            self._client.room.set()

    async def _publish(self, step: int) -> None:
        await asyncio.gather(*(engine.process.actor.serve.remote(step) for engine in self._client.engines))
        await self._buffer.publish(PublishRecord(step, step, f"{step:064x}", 0.0, 0.0, 0.0, 0.0))

    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(LATE_S)
            self._late.append(time.monotonic() - began - LATE_S)

    def _counted(self) -> Counter[str]:
        """The counts in the journal."""
        with closing(open_for_reading(self._journal)) as journal:
            of_rollouts = "SELECT count(*), total(tokens) FROM rollouts WHERE finish_reason IS NOT NULL"
            rollouts, tokens = journal.execute(of_rollouts).fetchone()
            (groups,) = journal.execute("SELECT count(*) FROM groups WHERE ended_at IS NOT NULL").fetchone()
        # The write-ahead log contains copies, which SQLite moves into the file from time to time.
        return Counter(rollouts=rollouts, tokens=int(tokens), groups=groups, bytes=self._journal.stat().st_size)

    async def _no_record(self, kind: str, part: str, message: str) -> None:
        raise RuntimeError(f"{part}: {message}")


PARTS: dict[str, Callable[[str], bool]] = {
    "rewards": lambda title: title.startswith("ray::RewardActor") or "workers.child" in title,
    "engines": lambda title: title.startswith("ray::EngineHost"),
    "Ray": lambda title: "raylet" in title or "gcs_server" in title,
}


def cpu_seconds() -> dict[str, float]:
    """CPU seconds so far, of the driver and of its processes by their part."""
    import psutil

    used = {"driver": time.process_time(), **dict.fromkeys(PARTS, 0.0)}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            title, times = " ".join(process.cmdline()), process.cpu_times()
            part = next((part for part, is_of in PARTS.items() if is_of(title)), None)
            if part is not None:
                used[part] += times.user + times.system
    return used


def figures_row(engines: int, load: Load, figures: Mapping[str, float]) -> str:
    """A row of the table, as ``COLUMNS`` names its columns."""
    return row(
        f"{engines}",
        f"{engines * load.rate:,.0f}",
        f"{figures['tokens/s']:,.0f}",
        f"{figures['groups/s']:.1f}",
        *(f"{figures[f'{part} CPU s']:.2f}" for part in ("driver", "rewards")),
        *(f"{figures[f'{part} CPU']:.0%}" for part in ("driver", "engines")),
        *(f"{figures[f'late, {which} ms']:.1f}" for which in ("median", "99th percentile", "largest")),
        f"{figures['journal bytes a token']:.1f}",
    )


COLUMNS = (
    *("engines", "offered tokens/s", "tokens/s", "groups/s"),
    *("CPU s: driver", "rewards"),
    *("share of a core: driver", "stand-ins"),
    *("late ms: median", "99th percentile", "largest"),
    "journal bytes a token",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 8, 64], help="numbers of engines, one run each")
    parser.add_argument("--rate", type=float, default=5000.0, help="tokens/s of an engine with full slots")
    parser.add_argument("--slots", type=int, default=64, help="requests that an engine runs at once")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of a rollout, on average")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--seconds", type=float, default=40.0, help="seconds that are measured")
    parser.add_argument("--warm-up", type=float, default=40.0, help="seconds before: the first groups must end")
    parser.add_argument("--folder", type=Path, help="the folder of the journal")
    arguments = vars(parser.parse_args())
    numbers, parent = arguments.pop("engines"), arguments.pop("folder")
    load = Load(**arguments)

    import ray

    # As in a local run.
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_task_events_report_interval_ms": "0",
    }
    print(f"{load}, {os.cpu_count()} cores\n\n{header(*COLUMNS)}", flush=True)
    for engines in numbers:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:
            with tempfile.TemporaryDirectory(prefix="bench-", dir=parent) as folder:
                print(figures_row(engines, load, asyncio.run(measured(engines, load, Path(folder)))), flush=True)
        finally:
            ray.shutdown()


async def measured(engines: int, load: Load, folder: Path) -> dict[str, float]:
    """The figures for one number of engines."""
    spec = load.spec(engines)
    buffer, opening = await Buffer.open(folder / FILE, BufferSettings.from_spec(spec), "train", limit_s=NEVER_S)
    return await Driver(spec, folder, load, buffer).measure(opening)


if __name__ == "__main__":
    main()
