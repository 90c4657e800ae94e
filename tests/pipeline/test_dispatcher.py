"""Routing: every request ends exactly once, on the engine it went to, or was cancelled."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins import StandInEngine, dispatcher_over, request, rollout

from asyncrl_cli.pipeline.dispatcher import Dispatcher
from asyncrl_cli.rollout.records import EngineActivity, Rollout, RolloutFailure, RolloutRequest
from asyncrl_cli.runs.directory import RunError

Ended = list[tuple[RolloutRequest, Rollout | RolloutFailure]]


class Owner:
    """Keeps what ended, in the batches it came in."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.failures: list[RolloutFailure] = []

    def on_end(self, ended: Ended) -> None:
        assert all(asked.rollout_id == result.rollout_id for asked, result in ended)
        self.batches.append([asked.rollout_id for asked, _ in ended])
        self.failures += [result for _, result in ended if isinstance(result, RolloutFailure)]

    @property
    def ended(self) -> list[str]:
        return [rollout_id for batch in self.batches for rollout_id in batch]


@asynccontextmanager
async def collecting(dispatcher: Dispatcher) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(dispatcher.collect_forever(engine)) for engine in dispatcher.engines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(outcome, asyncio.CancelledError):
                raise outcome


def build(engines: int = 1, retries: int = 0) -> tuple[Dispatcher, list[StandInEngine]]:
    actors = [StandInEngine() for _ in range(engines)]
    return dispatcher_over(actors, retries), actors


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_requests_go_to_the_least_loaded_engine_and_only_on_flush() -> None:
    async def check() -> None:
        dispatcher, (first, second) = build(engines=2)
        owner = Owner()
        for size in (3, 1, 1, 2):
            engine = dispatcher.least_loaded()
            offset = dispatcher.running
            dispatcher.enqueue(engine, [request(f"r{offset + i}") for i in range(size)], owner.on_end)
        assert (first.ids, second.ids) == ([], [])
        await dispatcher.flush()
        assert (first.ids, second.ids) == (["r0", "r1", "r2"], ["r3", "r4", "r5", "r6"])
        assert dispatcher.running == 7
        await dispatcher.flush()
        assert len(first.ids + second.ids) == 7, "sent once"
        async with collecting(dispatcher):
            await second.deliver(*map(rollout, second.ids))
        assert dispatcher.least_loaded().name == "engine-1"
        assert dispatcher.running == 3

    run(check())


def test_a_failure_is_tried_again_on_the_spot_and_then_told() -> None:
    async def check() -> None:
        dispatcher, (engine,) = build(retries=2)
        owner = Owner()
        dispatcher.enqueue(dispatcher.engines[0], [request("a"), request("b")], owner.on_end)
        await dispatcher.flush()
        async with collecting(dispatcher):
            await engine.deliver(RolloutFailure("a", "first"), rollout("b"))
            assert engine.ids == ["a", "b", "a"]
            await engine.deliver(RolloutFailure("a", "second"))
            assert engine.ids == ["a", "b", "a", "a"]
            assert owner.ended == ["b"]
            assert dispatcher.running == 1
            await engine.deliver(RolloutFailure("a", "third"))
        assert owner.ended == ["b", "a"]
        assert owner.failures == [RolloutFailure("a", "third")]
        assert engine.submitted[0] == engine.submitted[3], "the very same request, with its seed"
        assert dispatcher.running == 0

    run(check())


def test_what_ends_together_is_told_together_to_each_owner() -> None:
    async def check() -> None:
        dispatcher, (engine,) = build()
        one, other = Owner(), Owner()
        dispatcher.enqueue(dispatcher.engines[0], [request("a"), request("b")], one.on_end)
        dispatcher.enqueue(dispatcher.engines[0], [request("c")], other.on_end)
        await dispatcher.flush()
        async with collecting(dispatcher):
            await engine.deliver(rollout("c"), rollout("a"), RolloutFailure("b", "gone"))
        assert one.batches == [["a", "b"]]
        assert other.batches == [["c"]]

    run(check())


def test_a_cancelled_request_is_stopped_and_ignored_when_it_arrives() -> None:
    async def check() -> None:
        dispatcher, (first, second) = build(engines=2, retries=5)
        owner = Owner()
        for name in ("a", "b", "c"):
            dispatcher.enqueue(dispatcher.least_loaded(), [request(name)], owner.on_end)
        await dispatcher.flush()
        dispatcher.enqueue(dispatcher.engines[1], [request("d")], owner.on_end)
        await dispatcher.cancel(["a", "b", "d", "unknown"])
        assert (first.cancelled, second.cancelled) == (["a"], ["b", "d"])
        await dispatcher.flush()
        assert second.ids == ["b"], "d had not been sent"
        assert dispatcher.running == 1
        async with collecting(dispatcher):
            await first.deliver(rollout("a"), rollout("c"))
            await second.deliver(RolloutFailure("b", "cancelled"))
        assert owner.ended == ["c"]
        assert second.ids == ["b"], "a cancelled request is not tried again"

    run(check())


def test_what_the_owner_enqueues_when_told_is_sent_at_once() -> None:
    async def check() -> None:
        dispatcher, (engine,) = build()

        def on_end(ended: Ended) -> None:
            if len(engine.ids) < 4:
                dispatcher.enqueue(dispatcher.engines[0], [request(f"r{len(engine.ids)}")], on_end)

        dispatcher.enqueue(dispatcher.engines[0], [request("r0")], on_end)
        await dispatcher.flush()
        async with collecting(dispatcher):
            for number in range(4):
                await engine.deliver(rollout(f"r{number}"))
        assert engine.ids == ["r0", "r1", "r2", "r3"]

    run(check())


def test_activity_adds_up() -> None:
    async def check() -> None:
        dispatcher, (engine,) = build()
        async with collecting(dispatcher):
            await engine.deliver(activity=EngineActivity(10, 1.0, 0.25, 2.0))
            await engine.deliver(activity=EngineActivity(5, 0.5, 0.25, 1.0))
        assert dispatcher.engines[0].activity == EngineActivity(15, 1.5, 0.5, 3.0)

    run(check())


def test_an_error_of_the_owner_ends_the_collection() -> None:
    async def check() -> None:
        dispatcher, (engine,) = build()

        def on_end(ended: Ended) -> None:
            raise RunError("too many failures")

        dispatcher.enqueue(dispatcher.engines[0], [request("a")], on_end)
        collector = asyncio.create_task(dispatcher.collect_forever(dispatcher.engines[0]))
        delivery = asyncio.create_task(engine.deliver(rollout("a")))
        await asyncio.wait([collector])
        delivery.cancel()
        with pytest.raises(RunError, match="too many failures"):
            collector.result()

    run(check())


@given(
    data=st.data(),
    engines=st.integers(1, 3),
    retries=st.integers(0, 2),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=8),
)
@settings(deadline=None, max_examples=60)
def test_every_request_ends_exactly_once(data: st.DataObject, engines: int, retries: int, sizes: list[int]) -> None:
    async def check() -> None:
        dispatcher, actors = build(engines, retries)
        owner = Owner()
        for group, size in enumerate(sizes):
            loads = [len(engine.pending) for engine in dispatcher.engines]
            engine = dispatcher.least_loaded()
            assert len(engine.pending) == min(loads)
            dispatcher.enqueue(engine, [request(f"{group}-{i}") for i in range(size)], owner.on_end)
        await dispatcher.flush()
        failed: Counter[str] = Counter()
        cancelled: set[str] = set()
        async with collecting(dispatcher):
            while dispatcher.running:
                number = data.draw(st.integers(0, engines - 1))
                pending = sorted(dispatcher.engines[number].pending)
                if not pending:
                    continue
                chosen = data.draw(st.lists(st.sampled_from(pending), unique=True, min_size=1))
                event = data.draw(st.sampled_from(["finish", "fail", "cancel"]))
                if event == "cancel":
                    await dispatcher.cancel(chosen)
                    cancelled |= set(chosen)
                    await actors[number].deliver(*map(rollout, chosen))
                elif event == "fail":
                    failed.update(chosen)
                    await actors[number].deliver(*(RolloutFailure(name, "no") for name in chosen))
                else:
                    await actors[number].deliver(*map(rollout, chosen))
        everything = {f"{group}-{i}" for group, size in enumerate(sizes) for i in range(size)}
        assert len(owner.ended) == len(set(owner.ended))
        assert set(owner.ended) == everything - cancelled
        assert {failure.rollout_id for failure in owner.failures} == {n for n in failed if failed[n] == retries + 1}
        sent = Counter(name for actor in actors for name in actor.ids)
        assert all(sent[name] == 1 + min(failed[name], retries) for name in everything)

    run(check())
