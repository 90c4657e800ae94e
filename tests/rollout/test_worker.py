"""The actor with an engine, without Ray and with a stand-in for the engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl_cli.records.generation import (
    Attestation,
    Delivery,
    Placement,
    Rollout,
    RolloutFailure,
    RolloutRequest,
    Segment,
)
from asyncrl_cli.rollout.continuation import Aborted
from asyncrl_cli.rollout.worker import RolloutWorker
from asyncrl_cli.system.remote import ActorDied
from asyncrl_cli.weights.layout import TensorSlot
from tests.orchestrator.stand_ins import request, rollout, segment, spec

SPEC = spec()
PATH = os.devnull
"""A path of existing memory."""


class StandInEngine:
    """Every request waits until the test ends it."""

    def __init__(self) -> None:
        self.waiting: dict[str, asyncio.Future[Rollout]] = {}
        self.cancelled: list[str] = []
        self.stall_s = 0.0
        self.dead = False
        self.generating = True
        self.version: int | None = None
        self.returned: list[Placement] = []
        self.tokens: dict[str, int] = {}
        """The number of tokens of each running rollout."""

    async def generate(self, request: RolloutRequest) -> Rollout:
        self.waiting[request.rollout_id] = asyncio.get_running_loop().create_future()
        try:
            return await self.waiting[request.rollout_id]
        except asyncio.CancelledError:
            self.cancelled.append(request.rollout_id)
            raise

    async def abort(self) -> None:
        for name, answer in self.waiting.items():
            if not answer.done():
                answer.set_exception(Aborted([segment(name, 0, self.tokens[name])] if name in self.tokens else []))

    def segments(self, since: Mapping[str, int]) -> list[Segment]:
        return [
            segment(name, since[name], end - since[name])
            for name, end in self.tokens.items()
            if name in since and end > since[name]
        ]

    def sampled_tokens(self) -> int:
        return sum(self.tokens.values())

    def sequence_s(self) -> float:
        return 0.5

    def placements(self) -> list[Placement]:
        returned, self.returned = self.returned, []
        return returned

    async def death(self) -> ActorDied:
        return ActorDied("vLLM's core process has died: SIGSEGV")

    async def update_weights(
        self, version: int, path: str, slots: tuple[TensorSlot, ...], policy: str, on_pause: Callable[[], None]
    ) -> float:
        on_pause()
        self.version = version
        return self.stall_s

    async def attest(self, probe_ids: tuple[int, ...], stall_s: float, images: Any = ()) -> Attestation:
        return Attestation(self.version, np.zeros(len(probe_ids) - 1, dtype=np.float32), stall_s)


@pytest.fixture
def worker(tmp_path: Path, restored_output: None) -> RolloutWorker:
    """A worker with a stand-in engine."""
    worker = RolloutWorker("engine-0", SPEC, str(tmp_path))
    worker._engine = StandInEngine()  # type: ignore[assignment]
    return worker


def bounds(delivery: Delivery) -> list[tuple[str, int, int]]:
    return [(segment.rollout_id, segment.start, segment.end) for segment in delivery.segments]


def ids(delivery: Delivery) -> list[str]:
    return [rollout.rollout_id for rollout in delivery.rollouts]


async def submitted(worker: RolloutWorker, *names: str) -> StandInEngine:
    engine: Any = worker._engine
    await worker.submit([request(name) for name in names])
    await asyncio.sleep(0)  # let the tasks begin
    assert list(engine.waiting)[-len(names) :] == list(names)
    return engine  # type: ignore[no-any-return]


async def test_results_are_delivered_once_and_in_order(worker: RolloutWorker) -> None:
    engine = await submitted(worker, "a", "b", "c")
    engine.returned = [Placement("a", 2.0, 0.5, 3)]
    engine.waiting["b"].set_result(rollout("b", (0,) * 2))
    engine.waiting["a"].set_result(rollout("a", (0,) * 5))
    delivery = await worker.collect(60.0)
    assert ids(delivery) == ["b", "a"]
    assert not any(rollout.prompt_ids for rollout in delivery.rollouts)
    assert (delivery.activity.generated_tokens, delivery.activity.sequence_s) == (7, 0.5)
    assert delivery.placements == [Placement("a", 2.0, 0.5, 3)]
    again = await worker.collect(0.0)
    assert (again.rollouts, again.placements) == ([], [])
    collecting = asyncio.create_task(worker.collect(60.0))
    await asyncio.sleep(0)
    assert not collecting.done()
    engine.waiting["c"].set_result(rollout("c"))
    assert ids(await collecting) == ["c"]
    collecting = asyncio.create_task(worker.collect(60.0))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not collecting.done(), "without new results it waits"
    collecting.cancel()


async def test_rollouts_that_wait_for_a_weight_version_are_not_silent(worker: RolloutWorker) -> None:
    engine = await submitted(worker, "a")
    for engine.generating in (True, False):
        await asyncio.sleep(0.01)
        assert ((await worker.collect(0.0)).activity.silent_s > 0) == engine.generating


async def test_the_result_of_a_cancelled_rollout_is_not_that_of_a_later_request_with_its_id(
    worker: RolloutWorker,
) -> None:
    engine = await submitted(worker, "a", "failed", "aborted", "running", "b")
    engine.waiting["a"].set_result(rollout("a"))
    engine.waiting["failed"].set_exception(RuntimeError())
    engine.waiting["aborted"].set_exception(Aborted([]))
    engine.waiting["b"].set_result(rollout("b"))
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.0)
    await worker.cancel(["a", "failed", "aborted", "running", "unknown"])
    await worker.submit([request("a"), request("failed"), request("aborted"), request("running")])
    delivery = await worker.collect(60.0)
    assert (ids(delivery), delivery.failures, delivery.aborted) == (["b"], [], [])
    assert engine.cancelled == ["running"]


async def test_an_update_brings_the_new_tokens_of_running_rollouts(worker: RolloutWorker) -> None:
    engine = await submitted(worker, "1-0", "1-1", "eval:0:greedy:0")
    engine.tokens = {"1-0": 4, "1-1": 0, "eval:0:greedy:0": 3}
    await worker.update_weights(1, PATH, (), "keep", (1, 2))
    engine.tokens |= {"1-0": 6, "1-1": 2}
    await worker.update_weights(2, PATH, (), "keep", (1, 2))
    assert bounds(await worker.collect(60.0)) == [("1-0", 0, 4), ("1-0", 4, 6), ("1-1", 0, 2)]
    collecting = asyncio.create_task(worker.collect(60.0))
    await worker.update_weights(3, PATH, (), "keep", (1, 2))
    await asyncio.sleep(0)
    assert not collecting.done(), "no token is new"
    engine.tokens["1-1"] = 3
    await worker.update_weights(4, PATH, (), "keep", (1, 2))
    assert bounds(await collecting) == [("1-1", 2, 3)]


async def test_new_tokens_come_at_least_every_segment_seconds(worker: RolloutWorker) -> None:
    worker._spec = SPEC.model_copy(update={"journal": SPEC.journal.model_copy(update={"segment_seconds": 0.01})})
    engine = await submitted(worker, "1-0")
    engine.tokens = {"1-0": 4}
    await worker.collect(0.0)
    engine.tokens = {"1-0": 9}
    delivery = await worker.collect(60.0)
    assert bounds(delivery)[-1][2] == 9
    assert not delivery.rollouts


async def test_a_rollout_that_ended_drops_its_segments(worker: RolloutWorker) -> None:
    engine = await submitted(worker, "1-0", "1-1", "1-2")
    engine.tokens = {"1-0": 4, "1-1": 5, "1-2": 6}
    await worker.update_weights(1, PATH, (), "keep", (1, 2))
    engine.waiting["1-0"].set_result(rollout("1-0"))
    await worker.cancel(["1-2"])
    await asyncio.sleep(0)
    delivery = await worker.collect(60.0)
    assert (ids(delivery), bounds(delivery)) == (["1-0"], [("1-1", 0, 5)])


async def test_a_failed_rollout_delivers_its_tokens(worker: RolloutWorker) -> None:
    engine = await submitted(worker, "1-0", "1-1")
    engine.tokens = {"1-0": 4, "1-1": 5}
    await worker.update_weights(1, PATH, (), "keep", (1, 2))
    engine.tokens["1-0"] = 7
    engine.waiting["1-0"].set_exception(RuntimeError("the engine is dead"))
    delivery = await worker.collect(60.0)
    assert bounds(delivery) == [("1-0", 0, 4), ("1-0", 4, 7), ("1-1", 0, 5)]
    assert delivery.failures == [RolloutFailure("1-0", "RuntimeError: the engine is dead")]
    engine.tokens["1-0"] = 9
    await worker.update_weights(2, PATH, (), "keep", (1, 2))
    assert bounds(await worker.collect(0.0)) == [], "it has ended"


async def test_when_the_engine_dies_its_last_tokens_come_and_no_rollout_has_failed(worker: RolloutWorker) -> None:
    engine = await submitted(worker, "1-0", "1-1", "1-2")
    engine.tokens = {"1-0": 4, "1-1": 5}
    engine.dead = True
    engine.waiting["1-2"].set_result(rollout("1-2"))
    for name in ("1-0", "1-1"):
        engine.waiting[name].set_exception(RuntimeError("the engine is dead"))
    delivery = await worker.collect(60.0)
    assert bounds(delivery) == [("1-0", 0, 4), ("1-1", 0, 5)]
    assert (ids(delivery), delivery.failures) == (["1-2"], [])
    with pytest.raises(ActorDied, match="core process has died"):
        await worker.collect(60.0)


def test_an_engine_that_dies_of_the_probe_says_why(worker: RolloutWorker) -> None:
    engine: Any = worker._engine

    async def attest(probe_ids: tuple[int, ...], stall_s: float, images: Any = ()) -> Attestation:
        engine.dead = True
        raise RuntimeError("EngineCore encountered an issue")

    engine.attest = attest
    with pytest.raises(ActorDied, match="SIGSEGV"):
        asyncio.run(worker.update_weights(1, PATH, (), "keep", (1, 2)))


async def test_an_engine_without_new_tokens_is_silent(worker: RolloutWorker) -> None:
    assert (await worker.collect(0.0)).activity.silent_s == 0.0
    engine = await submitted(worker, "1-0")
    one, two = [(await worker.collect(0.01)).activity.silent_s for _ in range(2)]
    assert 0.0 < one < two
    engine.tokens["1-0"] = 1
    assert (await worker.collect(0.01)).activity.silent_s == 0.0


async def test_an_aborted_rollout_delivers_its_tokens_once_and_has_not_failed(worker: RolloutWorker) -> None:
    engine = await submitted(worker, "1-0", "1-1", "eval:0:greedy:0")
    engine.tokens = {"1-0": 4, "eval:0:greedy:0": 3}
    await worker.update_weights(1, PATH, (), "keep", (1, 2))
    engine.tokens["1-0"] = 6
    await worker.abort()
    delivery = await worker.collect(60.0)
    assert sorted(delivery.aborted) == ["1-0", "1-1", "eval:0:greedy:0"]
    assert bounds(delivery) == [("1-0", 0, 4), ("1-0", 4, 6), ("eval:0:greedy:0", 0, 3)]
    assert (delivery.rollouts, delivery.failures) == ([], [])
    assert delivery.activity.generated_tokens == 9
    await worker.submit([request(name, prefix=(segment(name, 0, 6),)) for name in ("1-0", "1-1")])
    await asyncio.sleep(0)
    engine.tokens = {"1-0": 7, "1-1": 6}
    await worker.update_weights(2, PATH, (), "keep", (1, 2))
    assert bounds(await worker.collect(60.0)) == [("1-0", 6, 7)], "a prefix is not reported again"
    engine.waiting["1-0"].set_result(rollout("1-0", (0,) * 8))
    assert (await worker.collect(60.0)).activity.generated_tokens == 2, "nor counted as generated"


async def test_streamed_tokens_are_delivered_while_they_are_generated_and_others_are_not(worker: RolloutWorker) -> None:
    engine = await submitted(worker, "1-0")
    collecting = asyncio.create_task(worker.collect(60.0))
    await asyncio.sleep(0)
    streamed = [replace(request(name), streamed=True) for name in ("1-1/0", "eval:0:greedy:0/0")]
    await worker.submit(streamed)
    engine.tokens = {"1-0": 4, "1-1/0": 2, "eval:0:greedy:0/0": 3}
    assert bounds(await collecting) == [("1-1/0", 0, 2), ("eval:0:greedy:0/0", 0, 3)]
    engine.tokens["1-1/0"] = 3
    assert bounds(await worker.collect(60.0)) == [("1-1/0", 2, 3)]
    for name in ("1-1/0", "eval:0:greedy:0/0"):
        engine.waiting[name].set_result(rollout(name))
    assert len(ids(await worker.collect(60.0))) == 2
    collecting = asyncio.create_task(worker.collect(0.2))
    assert bounds(await collecting) == [], "no request is streaming"


async def test_an_awaited_end_is_delivered_at_once(worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl_cli.rollout.worker.COALESCE_S", 3600.0)
    engine = await submitted(worker, "1-0", "1-1")
    await worker.submit([replace(request("1-2/0"), awaited=True)])
    await asyncio.sleep(0)
    collecting = asyncio.create_task(worker.collect(60.0))
    engine.waiting["1-0"].set_result(rollout("1-0"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not collecting.done(), "it is delivered together with others"
    engine.waiting["1-2/0"].set_result(rollout("1-2/0"))
    assert ids(await asyncio.wait_for(collecting, 60.0)) == ["1-0", "1-2/0"]
