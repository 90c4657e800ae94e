"""Publishing: an engine that cannot prove the new weights ends the run by its name."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from stand_ins import spec

from asyncrl_cli.pipeline.publisher import Publisher, PublishReport
from asyncrl_cli.rollout.records import Attestation
from asyncrl_cli.runs.directory import RunError
from asyncrl_cli.train.records import Publication

PROBE = (1, 2, 3, 4)


def logprobs(version: int, step: float = 0.01) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The probe's log-probs under a version, which every update moves by ``step`` nats."""
    return np.full(len(PROBE) - 1, -1.0 - step * version, dtype=np.float32)


class Engine:
    """Serves what it is told, off by some nats; or stays at a version."""

    def __init__(self, off: float = 0.0, stuck_at: int | None = None, says: int | None = None) -> None:
        self.off = off
        self.stuck_at = stuck_at
        self.says = says
        self.step = 0.01
        self.update_weights = self

    async def remote(
        self, version: int, checksum: str, source: dict[str, Any], policy: str, probe_ids: tuple[int, ...]
    ) -> Attestation:
        assert (checksum, source, policy, probe_ids) == (f"sum {version}", {"path": "p"}, "keep", PROBE)
        serves = version if self.stuck_at is None else min(version, self.stuck_at)
        answer = logprobs(serves, self.step) + np.float32(self.off)
        return Attestation(version if self.says is None else self.says, answer, stall_s=0.25 + self.off)


class Fleet:
    """A trainer that publishes ``logprobs`` and engines."""

    def __init__(self, *engines: Engine, **sections: Any) -> None:
        self.spec = spec(**sections)
        self.engines = [(f"engine-{i}", engine) for i, engine in enumerate(engines)]
        self.step = 0.01

    async def train(self, method: str, version: int) -> list[Publication]:
        assert method == "publish"
        return [Publication(version, f"sum {version}", {"path": "p"}, PROBE, logprobs(version, self.step))]


def publish(fleet: Fleet, versions: int) -> list[PublishReport]:
    async def all_versions() -> list[PublishReport]:
        publisher = Publisher(fleet, timeout_s=60.0)  # type: ignore[arg-type]
        return [await publisher.publish(version) for version in range(versions)]

    return asyncio.run(all_versions())


def test_engines_that_agree() -> None:
    reports = publish(Fleet(Engine(), Engine(off=1e-4)), versions=3)
    assert [report.version for report in reports] == [0, 1, 2]
    assert [report.change for report in reports] == pytest.approx([0.0, 0.01, 0.01], abs=1e-5)
    assert all(report.gap == pytest.approx(1e-4, rel=0.01) for report in reports)
    assert all(report.stall_s == pytest.approx(0.2501) for report in reports)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(Engine(off=0.002), id="too far off"),
        pytest.param(Engine(off=float("nan")), id="not a number"),
        pytest.param(Engine(stuck_at=1), id="keeps old weights"),
        pytest.param(Engine(says=1), id="says another version"),
    ],
)
def test_an_engine_that_does_not_prove_them_is_named(engine: Engine) -> None:
    with pytest.raises(RunError, match="engine-1: it does not serve weight version"):
        publish(Fleet(Engine(), engine), versions=3)


def test_an_engine_that_keeps_weights_which_changed_little_is_named() -> None:
    fleet = Fleet(Engine(), Engine(stuck_at=1))
    fleet.step = 5e-4  # less than the tolerance
    for _, engine in fleet.engines:
        engine.step = fleet.step
    with pytest.raises(RunError, match="engine-1: it does not serve weight version 2"):
        publish(fleet, versions=3)


def test_weights_that_do_not_change_are_no_fault() -> None:
    fleet = Fleet(Engine())
    fleet.step = fleet.engines[0][1].step = 0.0
    assert [report.change for report in publish(fleet, versions=3)] == [0.0, 0.0, 0.0]


def test_half_precision_has_a_wider_tolerance() -> None:
    wide = {"rollout": {"dtype": "bfloat16"}}
    assert publish(Fleet(Engine(off=0.2), **wide), versions=1)[0].gap == pytest.approx(0.2)
    with pytest.raises(RunError, match="engine-0"):
        publish(Fleet(Engine(off=0.6), **wide), versions=1)
