"""A lost engine is restarted alone, and its requests lose no token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_in_hosts import StandInHosts, layout
from stand_ins import (
    Notes,
    StandInEngine,
    StandInProcess,
    remote,
    request,
    rollout,
    run,
    segment,
    spec,
    turns,
    watchdog,
)

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator.engines import EngineKeeper
from asyncrl_cli.orchestrator.publisher import Publisher
from asyncrl_cli.records.generation import Attestation, Delivery, EngineActivity
from asyncrl_cli.records.training import Probe
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.system.remote import ActorCrashed, ActorLost
from asyncrl_cli.system.supervised_actor import RestartBudget

PROBE = np.zeros(3, np.float32)


class LoadingEngine(StandInEngine):
    """An engine that loads weights. Its log-probs are wrong by ``off`` nats."""

    def __init__(self, off: float = 0.0) -> None:
        super().__init__()
        self.off = off
        self.loaded: list[int] = []

    @remote
    async def update_weights(self, version: int, *_: Any) -> Attestation:
        self.loaded.append(version)
        return Attestation(version, PROBE + np.float32(self.off), 0.0)


class FailingProcess(StandInProcess):
    """May fail at its next starts, or start engines that serve wrong weights."""

    def __init__(self, name: str, budget: RestartBudget) -> None:
        self.offs: list[float] = []
        self.made: list[LoadingEngine] = []
        self.failing_starts = 0
        super().__init__(name, self.make, budget)

    def make(self) -> LoadingEngine:
        self.made.append(LoadingEngine(self.offs.pop(0) if self.offs else 0.0))
        return self.made[-1]

    async def start(self, actor: Any) -> None:
        if self.failing_starts:
            self.failing_starts -= 1
            raise ActorLost("it does not start", location=self.name)


class Harness:
    """Engines under a keeper, with a trainer that has published version 0."""

    def __init__(self, engines: int, max_restarts: int) -> None:
        self.notes = Notes()
        budget = self.notes.budget(max_restarts)
        self.processes = [FailingProcess(f"engine-{index}", budget) for index in range(engines)]
        processes: list[Any] = [*self.processes]
        self.client = GenerationClient(processes, slots=8, retries=0, hang_s=600.0, decode=str)
        self.hosts = StandInHosts(budget)
        ranks: Any = SimpleNamespace(
            write=self._write, layout=self._layout, check=self._check_ranks, nodes=("trainer",)
        )
        trainer: Any = SimpleNamespace(at_step=lambda step, work, go_back: work(), ranks=ranks)
        self.publisher = Publisher(
            spec(),
            opening=SimpleNamespace(version=-1, checksum=None),  # type: ignore[arg-type]
            trainer=trainer,
            client=self.client,
            replicas=self.hosts.replicas,
            buffer=SimpleNamespace(publish=lambda record: asyncio.sleep(0)),  # type: ignore[arg-type]
            watchdog=watchdog(),
            budget=budget,
        )
        self.serving = asyncio.Semaphore(0)
        self.keeper = EngineKeeper(self.client, self.publisher, joined=lambda _: self.serving.release())
        self.ended: list[str] = []

    async def _check_ranks(self) -> None:
        """No rank is dead."""

    async def _layout(self) -> Any:
        return layout(1)

    async def _write(self, version: int, paths: list[str]) -> Probe:
        self.hosts.write(paths[0], 0, version)
        return Probe((1, 2, 3, 4), PROBE)

    async def publish(self, version: int) -> None:
        await self.publisher.publish(version)
        await self.publisher.delivered()

    async def ask(self, *names: str) -> None:
        for name in names:
            self.client.enqueue(
                [request(name)],
                lambda ended: self.ended.extend(asked.rollout_id for asked, _ in ended),
            )
        await self.client.flush()


@asynccontextmanager
async def kept(engines: int, max_restarts: int = 10) -> AsyncIterator[Harness]:
    """Kept engines that serve version 0."""
    harness = Harness(engines, max_restarts)
    async with asyncio.TaskGroup() as tasks:
        keeping = [tasks.create_task(harness.keeper.keep(engine)) for engine in harness.client.engines]
        await harness.publish(0)
        for _ in keeping:
            await harness.serving.acquire()
        yield harness
        for task in keeping:
            task.cancel()


def ended_by(error: ExceptionGroup[Exception]) -> Exception:
    (cause,) = error.exceptions
    return cause


async def test_engines_prove_the_weights_before_they_get_a_request() -> None:
    harness = Harness(1, 0)
    await harness.ask("a")
    keeping = asyncio.create_task(harness.keeper.keep(harness.client.engines[0]))
    for _ in range(10):
        await asyncio.sleep(0)
    (engine,) = harness.processes[0].made
    assert (engine.loaded, engine.ids) == ([], [])
    await harness.publish(0)
    await harness.serving.acquire()
    await turns()
    assert (engine.loaded, engine.ids) == ([0], ["a"])
    keeping.cancel()


async def test_a_dead_engine_is_started_again_while_the_other_continues_its_requests() -> None:
    async with kept(2) as harness:
        first, second = (process.actor for process in harness.processes)
        await harness.ask("a", "b")
        await first.deliver(segments=[segment("a", 0, 3)])
        first.die()
        await harness.serving.acquire()
        assert harness.notes == [("engine", "engine-0", "the process died")]
        assert second.ids == ["b", "a"]
        assert [(part.start, part.end) for part in second.submitted[-1].prefix] == [(0, 3)]
        restarted = harness.processes[0].actor
        assert (restarted.loaded, restarted.ids) == ([0], [])
        await harness.ask("c")
        assert restarted.ids == ["c"], "it serves again"
        await second.deliver(rollout("a"), rollout("b"))
        await restarted.deliver(rollout("c"))
        assert harness.ended == ["a", "b", "c"]


async def test_the_only_engine_continues_its_own_requests_under_the_current_weights() -> None:
    async with kept(1) as harness:
        await harness.ask("a")
        await harness.publish(1)
        await harness.processes[0].actor.deliver(segments=[segment("a", 0, 2, version=1)])
        harness.processes[0].actor.put(activity=EngineActivity(silent_s=601.0))
        await harness.serving.acquire()
        await turns()
        old, new = harness.processes[0].made
        assert old.dead, "an engine that hangs is killed before it is replaced"
        assert (old.loaded, new.loaded) == ([0, 1], [1])
        assert [(part.start, part.end, part.version) for part in new.submitted[0].prefix] == [(0, 2, 1)]
        assert harness.notes[0][2] == "it has generated no token for 601 s"


async def test_an_engine_that_does_not_load_new_weights_is_replaced() -> None:
    async with kept(2) as harness:
        await harness.ask("a")
        harness.processes[0].actor.off = 1.0
        await harness.publish(1)
        assert [engine.name for engine in harness.client.serving()] == ["engine-1"]
        await harness.serving.acquire()
        ((kind, name, cause),) = harness.notes
        assert (kind, name) == ("engine", "engine-0")
        assert cause.startswith("it does not serve weight version 1")
        assert harness.processes[0].actor.loaded == [1]
        assert harness.processes[1].actor.ids == ["a"]


async def test_an_engine_that_cannot_be_brought_up_is_started_again() -> None:
    async with kept(1) as harness:
        await harness.ask("a")
        harness.processes[0].failing_starts = 1
        harness.processes[0].actor.die()
        await harness.serving.acquire()
        causes = [cause.split(":")[0] for _, _, cause in harness.notes]
        assert causes == ["the process died", "it does not start"]
        harness.processes[0].offs = [1.0]
        harness.processes[0].actor.die()
        await harness.serving.acquire()
        assert [cause.split(":")[0] for _, _, cause in harness.notes[2:]] == [
            "the process died",
            "it does not serve weight version 0",
        ]
        await turns()
        assert harness.processes[0].actor.ids == ["a"], "the request has survived all faults"


def test_too_many_restarts_end_the_run_with_the_first_cause() -> None:
    async def check() -> None:
        async with kept(2, max_restarts=1) as harness:
            harness.client.mark_dead("engine-1", "it is slow")
            await harness.serving.acquire()
            harness.processes[0].actor.die()
            await asyncio.get_running_loop().create_future()

    with pytest.raises(ExceptionGroup) as error:
        run(check())
    cause = ended_by(error.value)
    assert isinstance(cause, RunError)
    assert "restarted 1 times in 6 hours, and it failed again; the first cause: engine-1: it is slow" in str(cause)


class CrashingEngine(LoadingEngine):
    """Dies at its first request. ``number`` is different for each process."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    @remote
    async def collect(self, timeout_s: float) -> Delivery:
        while not self.submitted:
            await asyncio.sleep(0)
        raise ActorCrashed(f"vLLM's core process has died: ValueError: head size 24 at 0x{self.number:x}")


@pytest.mark.parametrize("completed", [False, True])
def test_an_engine_that_crashes_in_the_same_way_before_anything_worked_ends_the_run(completed: bool) -> None:
    notes: list[Any] = []

    async def check() -> None:
        async with kept(1) as harness:
            notes.append(harness.notes)
            (process,) = harness.processes
            if completed:
                await harness.ask("a")
                await process.actor.deliver(rollout("a"))

            def make() -> LoadingEngine:
                process.made.append(CrashingEngine(len(process.made)))
                return process.made[-1]

            process._make = make
            process.actor.die()
            await harness.ask("b")
            await asyncio.get_running_loop().create_future()

    with pytest.raises(ExceptionGroup) as error:
        run(check())
    cause = ended_by(error.value)
    assert isinstance(cause, RunError)
    crashes = [note for note in notes[0] if "head size" in note[2]]
    if completed:
        assert "restarted 10 times" in cause.message
        assert len(crashes) == 10
    else:
        assert "it failed 3 times in the same way before any engine completed a request" in cause.message
        assert "ValueError: head size 24" in cause.message
        assert len(crashes) == 3, "each crash is recorded"


def test_a_model_that_no_engine_proves_ends_the_run_at_its_first_publish() -> None:
    notes: list[Any] = []

    async def check() -> None:
        harness = Harness(1, 10)
        notes.append(harness.notes)
        harness.processes[0].actor.off = 0.7
        harness.processes[0].offs = [0.71, 0.72, 0.73]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(harness.keeper.keep(harness.client.engines[0]))
            await harness.publish(0)

    with pytest.raises(ExceptionGroup) as error:
        run(check())
    assert "it failed 3 times in the same way" in str(ended_by(error.value))
    assert "its log-probs of the probe differ from the trainer's by 0.72 nats" in str(ended_by(error.value))
    assert len(notes[0]) == 3


async def test_while_no_host_has_its_weights_a_restarted_engine_waits() -> None:
    async with kept(2) as harness:
        harness.hosts.agent("trainer").die()
        harness.hosts.agent("host-0").die()
        harness.processes[0].actor.die()
        while len(harness.processes[0].made) < 2:
            await asyncio.sleep(0)
        await harness.ask("a")
        assert harness.processes[1].actor.ids == ["a"]
        await harness.publish(0)
        await harness.serving.acquire()
        assert [actor.loaded for actor in harness.processes[0].made] == [[0], [0]]
        assert harness.processes[1].actor.loaded == [0]
