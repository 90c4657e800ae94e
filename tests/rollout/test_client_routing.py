"""Routing in bulk: every request ends exactly once, or is cancelled, however often its engine fails or is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.records.generation import (
    EngineActivity,
    EngineRequest,
    Placement,
    RolloutFailure,
    RolloutRequest,
    Segment,
)
from asyncrl_cli.rollout.client import EngineLost, GenerationClient
from asyncrl_cli.rollout.open_requests import EndedRequests, EngineState
from tests.orchestrator.stand_ins import StandInEngine, actors, client_over, collecting, request, rollout, run, segment


class Owner:
    """Records ended rollouts, batch by batch."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.failures: list[RolloutFailure] = []

    def on_end(self, ended: EndedRequests) -> None:
        assert all(asked.rollout_id == result.rollout_id for asked, result in ended)
        self.batches.append([asked.rollout_id for asked, _ in ended])
        self.failures += [result for _, result in ended if isinstance(result, RolloutFailure)]

    @property
    def ended(self) -> list[str]:
        return [rollout_id for batch in self.batches for rollout_id in batch]


async def asked(client: GenerationClient, owner: Owner, *names: str) -> None:
    """Enqueue these requests, and return when engines have them."""
    client.enqueue(map(request, names), owner.on_end)
    await client.flush()


def ranges(of: RolloutRequest) -> list[tuple[int, int]]:
    """The token ranges of the parts of a request's prefix."""
    return [(part.start, part.end) for part in of.prefix]


async def lost(client: GenerationClient, number: int) -> str:
    """Collect from an engine until it is lost, and take its requests back; returns the cause."""
    engine = client.engines[number]
    with pytest.raises(EngineLost) as error:
        await client.collect(engine)
    client.reclaim(engine)
    await client.flush()
    return str(error.value)


async def restart(engine: EngineState) -> StandInEngine:
    """A new actor for an engine, which serves."""
    process: Any = engine.process
    await process.replace()
    engine.serving = True
    actor: StandInEngine = process.actor
    return actor


# -- without faults


async def test_requests_go_to_the_least_loaded_engine_all_at_once_and_only_once() -> None:
    client = client_over(2)
    first, second = actors(client)
    owner = Owner()
    client.enqueue(map(request, "abc"), owner.on_end)
    client.enqueue(map(request, "de"), owner.on_end)
    assert (first.ids, second.ids) == ([], [])
    await client.flush()
    assert (first.ids, second.ids) == (["a", "c", "e"], ["b", "d"])
    assert (first.submits, second.submits) == (1, 1)
    assert client.running == 5
    await client.flush()
    assert len(first.ids + second.ids) == 5, "sent once"
    async with collecting(client):
        await first.deliver(rollout("a"), rollout("c"))
        await asked(client, owner, "f")
    assert first.ids[-1] == "f"
    assert client.running == 4


async def test_a_failure_is_retried_immediately_and_then_reported() -> None:
    client = client_over(1, retries=2)
    (engine,) = actors(client)
    owner = Owner()
    await asked(client, owner, "a", "b")
    async with collecting(client):
        await engine.deliver(RolloutFailure("a", "first"), rollout("b"))
        assert engine.ids == ["a", "b", "a"]
        await engine.deliver(RolloutFailure("a", "second"))
        assert engine.ids == ["a", "b", "a", "a"]
        assert owner.ended == ["b"]
        assert client.running == 1
        await engine.deliver(RolloutFailure("a", "third"))
    assert owner.ended == ["b", "a"]
    assert owner.failures == [RolloutFailure("a", "third")]
    assert engine.submitted[0] == engine.submitted[3], "the same request with the same seed"
    assert client.running == 0


async def test_results_that_end_together_are_reported_together_to_each_owner() -> None:
    client = client_over(1)
    (engine,) = actors(client)
    one, other = Owner(), Owner()
    await asked(client, one, "a", "b")
    await asked(client, other, "c")
    async with collecting(client):
        await engine.deliver(rollout("c"), rollout("a"), RolloutFailure("b", "gone"))
        await engine.deliver(rollout("unknown"))
    assert one.batches == [["a", "b"]]
    assert other.batches == [["c"]]
    assert client.room.is_set()


async def test_a_cancelled_request_is_stopped_and_ignored_when_it_arrives() -> None:
    client = client_over(2, retries=5)
    first, second = actors(client)
    owner = Owner()
    await asked(client, owner, "a", "b", "c")
    client.enqueue([request("d")], owner.on_end)
    await client.cancel(["a", "b", "d", "unknown"])
    assert (first.cancelled, second.cancelled) == (["a"], ["b"])
    await client.flush()
    assert second.ids == ["b"], "d had not been sent"
    assert client.running == 1
    async with collecting(client):
        await first.deliver(rollout("a"), rollout("c"))
        await second.deliver(RolloutFailure("b", "cancelled"))
    assert owner.ended == ["c"]
    assert second.ids == ["b"], "a cancelled request is not tried again"


async def test_requests_enqueued_in_the_callback_are_sent_at_once() -> None:
    client = client_over(1)
    (engine,) = actors(client)

    def on_end(ended: EndedRequests) -> None:
        if len(engine.ids) < 4:
            client.enqueue([request(f"r{len(engine.ids)}")], on_end)

    client.enqueue([request("r0")], on_end)
    await client.flush()
    async with collecting(client):
        for number in range(4):
            await engine.deliver(rollout(f"r{number}"))
    assert engine.ids == ["r0", "r1", "r2", "r3"]


async def test_new_tokens_of_known_rollouts_are_passed_on() -> None:
    client = client_over(1)
    (engine,) = actors(client)
    noted: list[Segment] = []
    client.enqueue([request("a")], Owner().on_end, noted.extend)
    await client.flush()
    parts = [segment("a", 0, 2), segment("a", 2, 1, version=1)]
    async with collecting(client):
        await engine.deliver(segments=[*parts, segment("cancelled", 0, 7)])
    assert noted == parts


async def test_activity_adds_up_over_reports() -> None:
    client = client_over(1)
    (engine,) = actors(client)
    async with collecting(client):
        await engine.deliver(activity=EngineActivity(10, 1.0, 0.25, 2.0, silent_s=3.0))
        await engine.deliver(activity=EngineActivity(5, 0.5, 0.25, 1.0))
    assert client.engines[0].activity == EngineActivity(15, 1.5, 0.5, 3.0)


async def test_tokens_are_progress_and_nothing_else_is() -> None:
    progress: list[None] = []
    client = client_over(1, on_progress=lambda: progress.append(None))
    (engine,) = actors(client)
    async with collecting(client):
        await engine.deliver(activity=EngineActivity(busy_s=1.0, wall_s=1.0))
        await engine.deliver(RolloutFailure("a", "no"))
        assert progress == []
        for number, delivered in enumerate(
            [{"segments": [segment("a", 0, 1)]}, {"activity": EngineActivity(1)}], start=1
        ):
            await engine.deliver(**delivered)
            assert len(progress) == number
        await engine.deliver(rollout("a"))
        assert len(progress) == 3


async def test_an_error_in_the_owners_callback_ends_the_collection() -> None:
    client = client_over(1)
    (engine,) = actors(client)

    def on_end(ended: EndedRequests) -> None:
        raise RunError("too many failures")

    client.enqueue([request("a")], on_end)
    await client.flush()
    engine.put(rollout("a"))
    with pytest.raises(RunError, match="too many failures"):
        await client.collect(client.engines[0])


# -- engines that are lost


async def test_requests_of_a_lost_engine_continue_elsewhere_from_their_tokens() -> None:
    client = client_over(2)
    first, second = actors(client)
    owner = Owner()
    await asked(client, owner, "a", "b", "c", "d")
    assert first.ids == ["a", "c"]
    first.put(rollout("c"), segments=[segment("a", 0, 3), segment("a", 3, 2, version=1)])
    first.put(segments=[segment("a", 5, 1, version=1)])
    losing = asyncio.create_task(lost(client, 0))
    await first.processed()
    first.die()
    assert await losing == "the process died"
    assert second.ids == ["b", "d", "a"]
    assert ranges(second.submitted[-1]) == [(0, 3), (3, 5), (5, 6)]
    assert second.submitted[-1].sampling == request("a").sampling, "the engine computes the rest"
    assert not client.engines[0].serving
    assert owner.ended == ["c"]


async def test_without_a_serving_engine_requests_wait_for_the_restart() -> None:
    client = client_over(2)
    owner = Owner()
    await asked(client, owner, "a", "b")
    for number, actor in enumerate(actors(client)):
        actor.die()
        await lost(client, number)
    await asked(client, owner, "c")
    assert client.running == 3
    assert client.serving() == []
    restarted = await restart(client.engines[1])
    await client.flush()
    assert restarted.ids, "it sends the waiting requests"
    other = await restart(client.engines[0])
    await client.flush()
    assert sorted(restarted.ids + other.ids) == ["a", "b", "c"]


async def test_a_silent_engine_is_lost_after_its_results_are_delivered() -> None:
    client = client_over(1, hang_s=30.0)
    (engine,) = actors(client)
    owner = Owner()
    await asked(client, owner, "a", "b")
    engine.put(activity=EngineActivity(silent_s=29.0))
    engine.put(rollout("a"), segments=[segment("b", 0, 1)], activity=EngineActivity(silent_s=31.0))
    assert await lost(client, 0) == "it has generated no token for 31 s"
    assert owner.ended == ["a"]
    restarted = await restart(client.engines[0])
    await client.flush()
    assert [ranges(asked) for asked in restarted.submitted] == [[(0, 1)]]


async def test_an_engine_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl_cli.rollout.client.POLL_S", 0.0)
    client = client_over(1, hang_s=0.01)
    assert await lost(client, 0) == "no answer within 0 s"


async def test_an_engine_that_does_not_take_requests_is_marked_dead() -> None:
    client = client_over(2, hang_s=0.01)
    silent, other = actors(client)
    silent.takes.clear()
    await asked(client, Owner(), "a", "b")
    assert silent.dead, "its process is ended, so that its collection ends"
    assert await lost(client, 0) == "no answer within 0 s"
    assert sorted(other.ids) == ["a", "b"]


async def test_an_engine_that_is_lost_while_others_get_their_requests_gets_none() -> None:
    client = client_over(2)
    slow, _ = actors(client)
    slow.takes.clear()
    sending = asyncio.create_task(asked(client, Owner(), "a", "b"))
    for _ in range(5):
        await asyncio.sleep(0)
    client.reclaim(client.engines[1])
    restarted = await restart(client.engines[1])
    client.engines[1].serving = False  # it has no weights yet
    client.enqueue([request("c")], Owner().on_end)
    slow.takes.set()
    await sending
    assert restarted.ids == []
    assert slow.ids == ["a", "b", "c"]


async def test_an_engine_marked_dead_is_lost_for_the_first_reason() -> None:
    client = client_over(2)
    first, second = actors(client)
    await asked(client, Owner(), "a", "b")
    client.mark_dead("engine-0", "it does not serve weight version 3")
    client.mark_dead("engine-0", "a second reason")
    assert first.dead
    assert not second.dead
    assert client.serving() == [client.engines[1]]
    assert await lost(client, 0) == "it does not serve weight version 3"
    restarted = await restart(client.engines[0])
    restarted.die()
    assert await lost(client, 0) == "the process died", "the old cause is not kept"


async def test_a_dead_engine_is_found_by_its_collector() -> None:
    client = client_over(1)
    (engine,) = actors(client)
    engine.die()
    owner = Owner()
    await asked(client, owner, "a")  # no error is raised here
    await client.cancel(["b"])
    assert await lost(client, 0) == "the process died"
    assert client.running == 1


# -- what is recorded of an engine's work


async def test_every_token_is_counted_at_the_engine_that_sampled_it() -> None:
    stays: list[EngineRequest] = []
    client = client_over(1, on_engine_request=stays.append)
    (engine,) = actors(client)
    await asked(client, Owner(), "a", "b")
    async with collecting(client):
        await engine.deliver(segments=[segment("a", 0, 3)])
        returned = [Placement("a", 9.0, 2.0, 1, 0.5)]
        await engine.deliver(segments=[segment("a", 3, 1), segment("b", 0, 2)], placements=returned)
    engine.die()
    await lost(client, 0)
    restarted = await restart(client.engines[0])
    await client.flush()
    async with collecting(client):
        await restarted.deliver(rollout("a", (0,) * 6), placements=[Placement("a", 4.0, 1.0, 2)])
        await restarted.deliver(segments=[segment("b", 2, 1)])
        await client.cancel(["b"])
    work = [(stay.request_id, stay.ending, stay.context_tokens, stay.tokens, stay.cached_tokens) for stay in stays]
    assert work == [
        ("a", "lost", 2, 4, 1),
        ("b", "lost", 2, 2, None),
        ("a", "stop", 2 + 4, 2, 2),
        ("b", "cancelled", 2 + 2, 1, None),
    ]
    running = [(stay.running_from, stay.running_until, stay.first_token_s) for stay in stays]
    first, _, last, _ = running
    assert running[1] == running[3] == (None, None, None)
    assert (first[1] - first[0], first[2]) == (pytest.approx(7.0), 0.5)  # type: ignore[operator]
    assert (last[1] - last[0], last[2]) == (pytest.approx(3.0), None)  # type: ignore[operator]
    assert last[1] == pytest.approx(stays[2].ended_at - 1.0, abs=0.5)


async def test_a_rollout_that_was_complete_when_its_engine_was_lost_is_counted_once() -> None:
    owner = Owner()
    stays: list[EngineRequest] = []
    client = client_over(1, on_engine_request=stays.append)
    (engine,) = actors(client)
    client.enqueue([request("a", max_tokens=3)], owner.on_end)
    await client.flush()
    async with collecting(client):
        await engine.deliver(segments=[segment("a", 0, 3)])
    engine.die()
    await lost(client, 0)
    assert owner.ended == ["a"]
    assert [(stay.ending, stay.context_tokens, stay.tokens) for stay in stays] == [("length", 2, 3)]


# -- random sequences of events


@pytest.mark.slow
@given(
    data=st.data(),
    engines=st.integers(1, 3),
    retries=st.integers(0, 2),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=8),
)
@settings(deadline=None, max_examples=60)
def test_every_request_ends_exactly_once(data: st.DataObject, engines: int, retries: int, sizes: list[int]) -> None:
    async def check() -> None:
        stays: list[EngineRequest] = []
        client = client_over(engines, retries, on_engine_request=stays.append)
        owner = Owner()
        generated: Counter[str] = Counter()
        failed: Counter[str] = Counter()
        cancelled: set[str] = set()
        for group, size in enumerate(sizes):
            requests = [request(f"{group}-{i}", max_tokens=10_000) for i in range(size)]
            client.enqueue(requests, owner.on_end)
        await client.flush()
        while client.running:
            number = data.draw(st.integers(0, engines - 1))
            pending = sorted(client.engines[number].pending)
            if not pending:
                continue
            actor = actors(client)[number]
            chosen = data.draw(st.lists(st.sampled_from(pending), unique=True, min_size=1))
            event = data.draw(st.sampled_from(["finish", "fail", "cancel", "grow", "die"]))
            if event == "die":
                actor.die()
                await lost(client, number)
                await restart(client.engines[number])
                await client.flush()
                asked_again = {
                    one.rollout_id: one
                    for engine, actor in zip(client.engines, actors(client), strict=True)
                    for one in actor.submitted
                    if one.rollout_id in engine.pending
                }
                for name in pending:  # it continues from all reported tokens
                    parts = ranges(asked_again[name])
                    assert [0, *(end for _, end in parts)] == [*(start for start, _ in parts), generated[name]]
                continue
            async with collecting(client):
                if event == "cancel":
                    await client.cancel(chosen)
                    cancelled |= set(chosen)
                    await actor.deliver(*map(rollout, chosen))
                elif event == "grow":
                    grown = [segment(name, generated[name], 2) for name in chosen]
                    generated.update(dict.fromkeys(chosen, 2))
                    await actor.deliver(segments=grown)
                elif event == "fail":
                    failed.update(chosen)
                    await actor.deliver(*(RolloutFailure(name, "no") for name in chosen))
                else:
                    await actor.deliver(*map(rollout, chosen))
        everything = {f"{group}-{i}" for group, size in enumerate(sizes) for i in range(size)}
        assert len(owner.ended) == len(set(owner.ended))
        assert set(owner.ended) == everything - cancelled
        assert {failure.rollout_id for failure in owner.failures} == {n for n in failed if failed[n] == retries + 1}
        for name in everything:  # it was on one engine at a time, and ended on the last one
            *earlier, last = [stay for stay in stays if stay.request_id == name]
            assert all(before.ended_at <= after.begun_at for before, after in pairwise([*earlier, last]))
            assert {stay.ending for stay in earlier} <= {"failed", "lost"}
            ended = "failed" if failed[name] == retries + 1 else "stop"
            assert last.ending == ("cancelled" if name in cancelled else ended)

    run(check())
