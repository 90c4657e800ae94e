"""Publishing: an engine serves nothing before it has proved the new weights; one that cannot is left out by name."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError
from stand_ins import run, spec

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator.publisher import Publisher
from asyncrl_cli.orchestrator.trainers import TrainerLost
from asyncrl_cli.orchestrator.watchdog import Watchdog
from asyncrl_cli.records.generation import Attestation
from asyncrl_cli.records.groups import PublishRecord
from asyncrl_cli.records.training import Publication

PROBE = (1, 2, 3, 4)
TURNS = 10
"""Turns of the loop after which everything has happened that can."""


def logprobs(version: int, step: float = 0.01) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The probe's log-probs under a version, which every update moves by ``step`` nats."""
    return np.full(len(PROBE) - 1, -1.0 - step * version, dtype=np.float32)


class Engine:
    """Serves the given weights, off by some nats; or stays at a version, reports another one, or is dead."""

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

    async def remote(
        self, version: int, checksum: str, source: dict[str, Any], policy: str, probe_ids: tuple[int, ...]
    ) -> Attestation:
        assert (source, policy, probe_ids) == ({"path": "p"}, "keep", PROBE)
        assert checksum.startswith(f"sum {version}")
        if self.dead:
            raise ActorDiedError()
        self.loaded.append(version)
        await self.may_answer.wait()
        serves = version if self.stuck_at is None else min(version, self.stuck_at)
        answer = logprobs(serves, self.step) + np.float32(self.off)
        return Attestation(version if self.says is None else self.says, answer, stall_s=0.25 + self.off)


class Harness:
    """A trainer that publishes ``logprobs``, engines that serve, and those that were reported as failed."""

    def __init__(self, *engines: Any, **sections: Any) -> None:
        self.engines = [(f"engine-{i}", engine) for i, engine in enumerate(engines)]
        self.step = 0.01
        self.bits = ""
        self.lost = False
        self.failed: dict[str, str] = {}
        self.up: list[Engine] = []
        stand_in: Any = self
        self.publisher = Publisher(spec(**sections), stand_in, stand_in, Watchdog(600.0, print))

    async def publish(self, version: int) -> Publication:
        if self.lost:
            raise TrainerLost("trainer-0", "the process died")
        return Publication(version, f"sum {version}{self.bits}", {"path": "p"}, PROBE, logprobs(version, self.step))

    async def serve(self, version: int) -> PublishRecord:
        return await self.publisher.serve(version)

    async def bring_up(self, engine: Engine) -> None:
        await self.publisher.bring_up(state := _state("new", engine))
        self.up += [engine] * state.serving

    def serving(self) -> list[Any]:
        return [_state(name, engine) for name, engine in self.engines]

    def mark_dead(self, name: str, cause: str) -> None:
        self.failed[name] = cause


def _state(name: str, engine: Engine) -> Any:
    return SimpleNamespace(name=name, process=SimpleNamespace(actor=engine), serving=False)


def publish(harness: Harness, versions: int) -> list[PublishRecord]:
    async def all_versions() -> list[PublishRecord]:
        return [await harness.serve(version) for version in range(versions)]

    return asyncio.run(all_versions())


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


# -- who serves


def test_engines_that_agree() -> None:
    harness = Harness(Engine(), Engine(off=1e-4))
    reports = publish(harness, versions=3)
    assert [(report.version, report.checksum) for report in reports] == [(0, "sum 0"), (1, "sum 1"), (2, "sum 2")]
    assert [report.change for report in reports] == pytest.approx([0.0, 0.01, 0.01], abs=1e-5)
    assert all(report.gap == pytest.approx(1e-4, rel=0.01) for report in reports)
    assert all(report.stall_s == pytest.approx(0.2501) for report in reports)
    assert harness.failed == {}
    assert harness.publisher.checksum == "sum 2"


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
    assert reports[1].gap < 1e-5, "the report is about those that serve"
    assert reports[1].stall_s == 0.25
    assert harness.engines[0][1].loaded == [0, 1]


def test_an_engine_that_keeps_weights_which_changed_little_is_reported() -> None:
    harness = Harness(Engine(), Engine(stuck_at=1))
    harness.step = 5e-4  # less than the tolerance
    for _, engine in harness.engines:
        engine.step = harness.step
    publish(harness, versions=2)
    assert harness.failed == {}
    publish(harness, versions=3)
    assert list(harness.failed) == ["engine-1"]


def test_weights_that_do_not_change_are_not_a_fault() -> None:
    harness = Harness(Engine())
    harness.step = harness.engines[0][1].step = 0.0
    assert [report.change for report in publish(harness, versions=3)] == [0.0, 0.0, 0.0]
    assert harness.failed == {}


def test_half_precision_has_a_wider_tolerance() -> None:
    wide = {"rollout": {"dtype": "bfloat16"}}
    harness = Harness(Engine(off=0.2), Engine(off=0.6), **wide)
    assert publish(harness, versions=1)[0].gap == pytest.approx(0.2)
    assert list(harness.failed) == ["engine-1"]


# -- the same weights again


def test_the_same_weights_are_not_loaded_twice() -> None:
    async def check() -> None:
        harness = Harness(Engine())
        await harness.serve(0)
        await harness.serve(1)
        harness.publisher.lost()
        report = await harness.serve(1)
        assert harness.engines[0][1].loaded == [0, 1]
        assert (report.checksum, report.stall_s, report.gap, report.change) == ("sum 1", 0.0, 0.0, 0.0)
        assert harness.publisher.available

    run(check())


def test_the_same_version_with_other_bits_is_loaded() -> None:
    async def check() -> None:
        harness = Harness(Engine())
        await harness.serve(1)
        harness.bits = ", differently rounded"
        assert (await harness.serve(1)).checksum == "sum 1, differently rounded"
        assert harness.engines[0][1].loaded == [1, 1]

    run(check())


def test_after_the_same_weights_again_an_outdated_engine_is_still_found_out() -> None:
    async def check() -> None:
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

    run(check())


# -- engines that come later


def test_a_new_engine_waits_for_the_first_weights_and_proves_them() -> None:
    async def check() -> None:
        harness, engine = Harness(), Engine()
        coming = asyncio.create_task(harness.bring_up(engine))
        await turns()
        assert (engine.loaded, harness.publisher.available) == ([], False)
        await harness.serve(0)
        await coming
        assert (engine.loaded, harness.up) == ([0], [engine])
        with pytest.raises(RunError, match="new: it does not serve weight version 0"):
            await harness.bring_up(Engine(off=1.0))
        assert harness.up == [engine]

    run(check())


@pytest.mark.parametrize("lost_by", ["the driver's word", "a publish that fails"])
def test_a_new_engine_waits_while_the_trainer_is_lost(lost_by: str) -> None:
    async def check() -> None:
        harness, engine = Harness(Engine()), Engine()
        await harness.serve(3)
        if lost_by == "the driver's word":
            harness.publisher.lost()
        else:
            harness.lost = True
            with pytest.raises(TrainerLost):
                await harness.serve(4)
            harness.lost = False
        coming = asyncio.create_task(harness.bring_up(engine))
        await turns()
        assert (engine.loaded, harness.publisher.available) == ([], False)
        assert harness.publisher.checksum == "sum 3", "the others still serve that"
        await harness.serve(3)
        await coming
        assert engine.loaded == [3]
        assert harness.engines[0][1].loaded == [3], "the others are not disturbed"

    run(check())


def test_a_publish_waits_until_a_new_engine_serves_so_that_it_is_included() -> None:
    async def check() -> None:
        harness, engine = Harness(), Engine()
        await harness.serve(0)
        engine.may_answer.clear()
        coming = asyncio.create_task(harness.bring_up(engine))
        await turns()
        publishing = asyncio.create_task(harness.serve(1))
        await turns()
        assert engine.loaded == [0]
        assert harness.publisher.checksum == "sum 0", "the mapping is not written while an engine reads it"
        harness.engines.append(("new", engine))
        engine.may_answer.set()
        await asyncio.gather(coming, publishing)
        assert engine.loaded == [0, 1], "the one that came up meanwhile is published to as well"

    run(check())


def test_a_trainer_lost_while_an_engine_waits_for_its_turn_makes_it_wait_on() -> None:
    async def check() -> None:
        harness, first, second = Harness(), Engine(), Engine()
        await harness.serve(0)
        first.may_answer.clear()
        coming = [asyncio.create_task(harness.bring_up(engine)) for engine in (first, second)]
        await turns()
        harness.publisher.lost()
        first.may_answer.set()
        await turns()
        assert (harness.up, second.loaded) == ([first], [])
        await harness.serve(0)
        await asyncio.gather(*coming)
        assert harness.up == [first, second]

    run(check())
