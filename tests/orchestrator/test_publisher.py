"""An engine serves new weights only after it has proved them; an engine that cannot prove them is reported.

Hosts that are slow or lose their memory do not delay others."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError
from stand_in_hosts import StandInAgent, StandInHosts, checksum, layout
from stand_ins import LIMIT_S, Notes, spec, turns, watchdog

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator.publisher import Publisher
from asyncrl_cli.orchestrator.replicas import HostGone
from asyncrl_cli.orchestrator.trainer_recovery import StepPassed
from asyncrl_cli.orchestrator.trainers import TrainerLost
from asyncrl_cli.records.generation import Attestation
from asyncrl_cli.records.groups import PublishRecord
from asyncrl_cli.records.training import Probe
from asyncrl_cli.system.remote import Unreachable
from asyncrl_cli.weights.manifest import ReplicaGone, Superseded

pytestmark = pytest.mark.slow

PROBE = (1, 2, 3, 4)
RANKS = 2


def logprobs(version: int, step: float = 0.01) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The probe's log-probs under a version. Every update changes them by ``step`` nats."""
    return np.full(len(PROBE) - 1, -1.0 - step * version, dtype=np.float32)


class Engine:
    """Serves weights with an error of ``off`` nats, keeps a version, reports another version, or is dead."""

    def __init__(
        self, off: float = 0.0, stuck_at: int | None = None, says: int | None = None, dead: bool = False
    ) -> None:
        self.off = off
        self.stuck_at = stuck_at
        self.says = says
        self.dead = dead
        self.step = 0.01
        self.loaded: list[int] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.update_weights = self
        self.hosts: StandInHosts

    async def remote(
        self, version: int, path: str, slots: Any, policy: str, probe_ids: tuple[int, ...], *_: Any
    ) -> Attestation:
        assert (slots, policy, probe_ids) == (layout(RANKS), "keep", PROBE)
        if self.dead:
            raise ActorDiedError()
        if path not in self.hosts.memory:
            raise ReplicaGone("the memory is gone")
        self.loaded.append(version)
        shards = self.hosts.memory[path]
        assert [shards[rank][:2] for rank in range(RANKS)] == [(version, rank) for rank in range(RANKS)]
        await self.may_answer.wait()
        serves = version if self.stuck_at is None else min(version, self.stuck_at)
        answer = logprobs(serves, self.step) + np.float32(self.off)
        return Attestation(
            version if self.says is None else self.says, answer, stall_s=0.25 + self.off, resumed_s=100.0
        )


class Harness:
    """A trainer of two ranks, on hosts ``a`` and ``b``, that publishes ``logprobs``; serving engines, the first on
    ``a`` and the others on hosts without ranks; and the engines that were reported as failed or taken out of service.
    """

    def __init__(self, *engines: Engine | None, opened: tuple[int, str | None] = (-1, None), **sections: Any) -> None:
        self.step = 0.01
        self.bits = ""
        self.lost = False
        self.nodes = ("a", "b")
        self.failed: dict[str, str] = {}
        self.withdrawn: list[str] = []
        self.up: list[Engine] = []
        self.writes = 0
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.step_now = -1
        """The step of the trainer's weights; -1: always the requested step."""
        self.recorded: list[PublishRecord] = []
        self.room = asyncio.Event()
        self.ranks = self
        self.notes = Notes()
        self.hosts = StandInHosts(self.notes.budget())
        self.engines = [self.state(f"engine-{i}", engine, f"c{i}" if i else "a") for i, engine in enumerate(engines)]
        for state in self.engines:
            state.serving = True
        stand_in: Any = self
        self.publisher = Publisher(
            spec(**sections),
            opening=SimpleNamespace(version=opened[0], checksum=opened[1]),  # type: ignore[arg-type]
            trainer=stand_in,
            client=stand_in,
            replicas=self.hosts.replicas,
            buffer=SimpleNamespace(publish=self._record),  # type: ignore[arg-type]
            watchdog=watchdog(),
            budget=self.notes.budget(),
        )

    def state(self, name: str, engine: Engine | None, node: str) -> Any:
        if engine is not None:
            engine.hosts = self.hosts
        return SimpleNamespace(name=name, process=SimpleNamespace(actor=engine, node=node), serving=False)

    async def layout(self) -> Any:
        return layout(RANKS)

    async def write(self, version: int, paths: list[str]) -> Probe:
        self.writes += 1
        await self.may_write.wait()
        if self.lost:
            raise TrainerLost("trainer-0", "the process died")
        for rank, path in enumerate(paths):
            self.hosts.write(path, rank, self.shard(version, rank))
        return Probe(PROBE, logprobs(version, self.step))

    async def check(self) -> None:
        if self.lost:
            raise TrainerLost("trainer-1", "the process died")

    def shard(self, version: int, rank: int) -> Any:
        return version, rank, self.bits

    def sum(self, version: int) -> str:
        """The checksum of a version."""
        return checksum(self.shard(version, rank) for rank in range(RANKS))

    async def at_step(self, step: int, work: Any, go_back: str) -> Any:
        """Like ``ResilientTrainer.at``."""
        if self.step_now > step and not go_back:
            raise StepPassed
        self.went_back_for = go_back if self.step_now > step else ""
        return await work()

    async def catch_up(self, step: int) -> None:
        pass

    async def _record(self, record: PublishRecord) -> None:
        self.recorded.append(record)

    async def serve(self, version: int) -> PublishRecord:
        await self.publisher.publish(version)
        await self.publisher.delivered()
        return self.recorded[-1]

    @property
    def available(self) -> bool:
        return self.publisher._available.is_set()

    @property
    def current(self) -> tuple[int, str]:
        assert self.publisher._current is not None
        return self.publisher._current.manifest.version, self.publisher._current.manifest.checksum

    async def bring_up(self, engine: Engine, node: str = "a") -> None:
        state = self.state("new", engine, node)
        await self.publisher.bring_up(state)
        self.up += [engine] * state.serving

    def serving(self) -> list[Any]:
        return [engine for engine in self.engines if engine.serving]

    def mark_dead(self, name: str, cause: str) -> None:
        self.failed[name] = cause

    async def withdraw(self, engine: Any, limit_s: float) -> None:
        engine.serving = False
        self.withdrawn.append(engine.name)


def publish(harness: Harness, versions: int) -> list[PublishRecord]:
    async def all_versions() -> list[PublishRecord]:
        return [await harness.serve(version) for version in range(versions)]

    return asyncio.run(all_versions())


def loaded(harness: Harness, engine: int = 0) -> list[int]:
    """The versions that an engine got."""
    return list(harness.engines[engine].process.actor.loaded)


# -- who serves


def test_engines_that_agree_serve() -> None:
    harness = Harness(Engine(), Engine(off=1e-4))
    reports = publish(harness, versions=3)
    assert [report.version for report in reports] == [0, 1, 2]
    assert [report.checksum for report in reports] == [harness.sum(version) for version in range(3)]
    assert [report.change for report in reports] == pytest.approx([0.0, 0.01, 0.01], abs=1e-5)
    assert all(report.gap == pytest.approx(1e-4, rel=0.01) for report in reports)
    assert all(report.stall_s == pytest.approx(0.2501) for report in reports)
    for report in reports:
        pauses = [report.pauses[engine.name] for engine in harness.engines]
        assert [end - begin for begin, end in pauses] == pytest.approx([0.25, 0.2501], abs=1e-5)
        assert all(end < time.time() - 100 for _, end in pauses)
    assert harness.failed == {}
    assert harness.current == (2, harness.sum(2))
    assert len({report.checksum for report in reports}) == 3


@pytest.mark.parametrize(
    ("broken", "cause"),
    [
        ({"off": 0.002}, "it does not serve weight version"),
        ({"off": float("nan")}, "it does not serve weight version"),
        ({"stuck_at": 0}, "it does not serve weight version 1"),
        ({"says": 0}, "it does not serve weight version 1"),
        ({"dead": True}, "the process died"),
        (None, "it was lost before the update"),
    ],
    ids=["too far off", "not a number", "keeps old weights", "says another version", "dead", "lost meanwhile"],
)
def test_an_engine_that_does_not_prove_them_is_reported_and_the_others_serve(
    broken: dict[str, Any] | None, cause: str
) -> None:
    harness = Harness(Engine(), None if broken is None else Engine(**broken))
    reports = publish(harness, versions=2)
    assert list(harness.failed) == ["engine-1"]
    assert cause in harness.failed["engine-1"]
    assert reports[1].gap < 1e-5, "the report is about serving engines"
    assert reports[1].stall_s == 0.25
    assert loaded(harness) == [0, 1]


# -- the same weights again


async def test_an_outdated_engine_is_found_after_the_same_weights_are_published_again() -> None:
    harness = Harness()
    harness.step = 5e-4
    await harness.serve(0)
    await harness.serve(1)
    await harness.serve(1)
    outdated = Engine(stuck_at=0)
    outdated.step = harness.step
    with pytest.raises(RunError, match="new: it does not serve weight version 1"):
        await harness.bring_up(outdated)
    assert harness.up == []


# -- engines that come later


async def test_a_new_engine_waits_for_the_first_weights_and_proves_them() -> None:
    harness, engine = Harness(), Engine()
    coming = asyncio.create_task(harness.bring_up(engine))
    await turns()
    assert (engine.loaded, harness.available) == ([], False)
    await harness.serve(0)
    await coming
    assert (engine.loaded, harness.up) == ([0], [engine])
    with pytest.raises(RunError, match="new: it does not serve weight version 0"):
        await harness.bring_up(Engine(off=1.0))
    assert harness.up == [engine]


async def test_a_version_that_is_replaced_while_an_engine_loads_it_is_not_served() -> None:
    harness, engine = Harness(), Engine()
    await harness.serve(0)
    engine.may_answer.clear()
    coming = asyncio.create_task(harness.bring_up(engine, "d"))
    await turns(50)
    assert engine.loaded == [0]
    await harness.serve(1)
    assert harness.up == [], "the publish does not wait for it"
    engine.may_answer.set()
    await coming
    assert (engine.loaded, harness.up) == ([0, 1], [engine])


async def test_an_engine_that_comes_up_during_the_write_is_published_to() -> None:
    harness, engine = Harness(), Engine()
    await harness.serve(0)
    state = harness.state("new", engine, "d")
    harness.engines.append(state)
    harness.may_write.clear()
    publishing = asyncio.create_task(harness.publisher.publish(1))
    await harness.publisher.bring_up(state)
    assert (engine.loaded, state.serving) == ([0], True)
    harness.may_write.set()
    await publishing
    await harness.publisher.delivered()
    assert engine.loaded == [0, 1]


# -- hosts


async def test_a_slow_host_is_left_behind_and_its_engine_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl_cli.orchestrator.publisher.LATE_S", 0.0)
    harness = Harness(Engine(), Engine(), Engine())
    await harness.serve(0)
    slow = harness.hosts.agent("c2")
    slow.may_fetch.clear()
    report = await harness.serve(1)
    assert (harness.withdrawn, harness.failed) == (["engine-2"], {})
    assert harness.notes == [("weights", "engine-2", NOT_IN_TIME)]
    assert report.transfer_s == 0.5
    assert [loaded(harness, engine) for engine in range(3)] == [[0, 1], [0, 1], [0]]
    coming = asyncio.create_task(harness.publisher.bring_up(harness.engines[2]))
    await turns(50)
    assert not harness.engines[2].serving
    await harness.serve(2)
    assert harness.withdrawn == ["engine-2"], "it is not waited for again"
    slow.may_fetch.set()
    await coming
    assert (loaded(harness, 2), harness.engines[2].serving) == ([0, 2], True)


NOT_IN_TIME = "its host did not get weight version 1 in time; it does not serve until then"


async def test_a_fetch_that_a_newer_version_supersedes_is_not_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl_cli.orchestrator.publisher.RETRY_S", LIMIT_S * 2)
    harness, engine, fetches = Harness(), Engine(), list[int]()
    await harness.serve(0)

    async def works(agent: StandInAgent) -> None:
        if agent._node == "d":
            fetches.append(1)
            while harness.current == (0, harness.sum(0)):
                await asyncio.sleep(0)
            if len(fetches) == 1:  # in the iteration of the event loop that replaces the version
                raise Superseded("a newer version is fetched")

    harness.hosts.works = works
    state = harness.state("new", engine, "d")
    harness.engines.append(state)
    coming = asyncio.create_task(harness.publisher.bring_up(state))
    await turns(50)
    await harness.serve(1)
    await coming
    assert (engine.loaded, state.serving, harness.notes) == ([1], True, [])


async def test_an_agent_that_is_lost_with_its_node_is_not_made_again_and_costs_no_restart() -> None:
    harness = Harness(Engine(), Engine())
    await harness.serve(0)
    harness.hosts.lose("c1")
    await harness.serve(1)
    assert (list(harness.failed), loaded(harness)) == (["engine-1"], [0, 1])
    assert "its node is gone" in harness.failed["engine-1"]
    with pytest.raises(HostGone, match="its node is gone"):
        await harness.publisher.bring_up(harness.engines[1])
    assert len(harness.hosts.agents["c1"]) == 1
    assert harness.notes == [], "no restart is counted"
    del harness.engines[1]
    await harness.serve(2)
    assert loaded(harness) == [0, 1, 2]


@pytest.mark.parametrize("returns", [False, True])
async def test_after_a_lost_connection_the_nodes_state_is_awaited(
    returns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host is disconnected. Later Ray reports it as dead, or it is connected again."""
    monkeypatch.setattr("asyncrl_cli.orchestrator.nodes.LOOK_S", 0.0)
    monkeypatch.setattr("asyncrl_cli.orchestrator.nodes.NODE_DEATH_S", 0.0 if returns else LIMIT_S)
    harness = Harness(Engine(), Engine())
    await harness.serve(0)
    cut_off = asyncio.Event()

    async def works(agent: StandInAgent) -> None:
        if agent._node == "c1" and agent is harness.hosts.agents["c1"][0]:
            cut_off.set()
            raise Unreachable("the connection is lost")

    harness.hosts.works = works
    publishing = asyncio.create_task(harness.serve(1))
    await cut_off.wait()
    await turns(50)
    if not returns:
        assert not publishing.done() and not harness.notes
        harness.hosts.lose("c1")
    await publishing
    assert [kind for kind, *_ in harness.notes] == (["host-agent"] if returns else [])
    assert list(harness.failed) == ([] if returns else ["engine-1"])


@pytest.mark.parametrize("passed", [False, True], ids=["trainer at its step", "trainer at a later step"])
@pytest.mark.parametrize("serves", [False, True], ids=["no engine serves", "another engine serves"])
async def test_guard_restores_the_version_that_no_host_has(
    passed: bool, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer returns to an earlier step only if no engine serves: otherwise the next publish comes anyway."""
    monkeypatch.setattr("asyncrl_cli.orchestrator.publisher.GUARD_S", 0.0)
    harness, engine = Harness(Engine()), Engine()
    await harness.serve(3)
    for node in ("a", "b"):
        harness.hosts.agent(node).die()
    harness.engines[0].serving = serves
    harness.step_now = 3 + passed
    coming = asyncio.create_task(harness.bring_up(engine))
    guarding = asyncio.create_task(harness.publisher.guard())
    if passed and serves:
        await turns(200)
        assert (harness.up, harness.writes) == ([], 1), "it waits for the next version"
        harness.step_now = -1
        await harness.serve(4)
    await coming
    assert harness.up == [engine]
    if not (passed and serves):
        assert bool(harness.went_back_for) == passed
        assert loaded(harness) == [3], "the same weights are not loaded again"
    guarding.cancel()


async def test_restore_writes_the_version_of_an_earlier_driver() -> None:
    unrecorded = Harness(Engine(), opened=(2, None))
    await unrecorded.publisher.restore()
    await unrecorded.publisher.restore()
    assert (unrecorded.writes, [record.version for record in unrecorded.recorded]) == (1, [2])
    same = Harness(Engine(), opened=(2, unrecorded.sum(2)))
    await same.publisher.restore()
    assert (loaded(same), same.recorded, same.notes) == ([2], [], [])
    other = Harness(Engine(), opened=(2, unrecorded.sum(1)))
    await other.publisher.restore()
    assert [kind for kind, *_ in other.notes] == ["weights"]
    assert "made version 2 again with other bits" in other.notes[0][2]
    assert [record.checksum for record in other.recorded] == [unrecorded.sum(2)], "as engines had"


async def test_publish_writes_a_version_again_that_is_lost_before_its_digests_are_known() -> None:
    harness = Harness(Engine())
    await harness.serve(0)
    await harness.publisher.publish(1)
    harness.hosts.agent("b").die()
    harness.step_now = 2  # the trainer has trained on
    await harness.publisher.delivered()
    assert (harness.writes, loaded(harness)) == (3, [0, 1])
    assert harness.went_back_for == "every host has lost version 1, so the trainer writes it again"


async def test_agents_of_hosts_that_the_run_has_left_are_ended() -> None:
    harness = Harness(Engine(), Engine())
    await harness.serve(0)
    gone = harness.hosts.agent("c1")
    del harness.engines[1]
    await harness.serve(1)
    assert gone.dead
    assert not harness.hosts.agent("a").dead
    assert harness.notes == []
