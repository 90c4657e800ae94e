"""Abort and continue: whatever engines abandon, each caller gets one complete rollout, and every request ends exactly
once, or is cancelled."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.records.generation import (
    EVALUATION,
    EngineActivity,
    EngineRequest,
    FinishReason,
    Placement,
    Rollout,
    RolloutFailure,
    RolloutRequest,
    Segment,
)
from asyncrl_cli.rollout.client import EngineLost, GenerationClient, GenerationFailed
from asyncrl_cli.rollout.continuation import finished
from asyncrl_cli.rollout.open_requests import EndedRequests, EngineState
from tests.orchestrator.stand_ins import (
    StandInEngine,
    StandInProcess,
    actors,
    client_over,
    collecting,
    request,
    rollout,
    run,
    segment,
    text_of,
    turns,
)


@asynccontextmanager
async def connected_client(engines: int = 1, **settings: Any) -> AsyncIterator[GenerationClient]:
    """A client that collects from its engines."""
    client = client_over(engines, **settings)
    async with collecting(client):
        yield client


async def begun(client: GenerationClient, *requests: RolloutRequest, **more: Any) -> list[asyncio.Task[Rollout]]:
    """Start callers that wait for these requests."""
    tasks = [asyncio.create_task(client.generate(one, **more)) for one in requests]
    await turns()
    return tasks


def complete(asked: RolloutRequest, *rest: Segment, reason: FinishReason = "stop") -> Rollout:
    """The answer of an engine that has generated the rest of a request."""
    return finished(asked, rest, reason, text_of)


def at(client: GenerationClient, rollout_id: str) -> StandInEngine:
    """The engine that has a request."""
    found: list[StandInEngine] = [engine.process.actor for engine in client.engines if rollout_id in engine.pending]
    (engine,) = found
    return engine


# -- abort and continue


async def test_requests_not_sent_before_the_pause_wait_unchanged() -> None:
    async with connected_client() as client:
        (engine,) = actors(client)
        engine.takes.clear()
        first = await begun(client, request("a"))
        second = await begun(client, request("b"))  # while the engine has not accepted the first request
        pausing = asyncio.create_task(client.pause())
        await turns()
        assert not pausing.done()
        engine.takes.set()
        await pausing
        assert (engine.ids, engine.aborts) == (["a"], 1), "it accepts earlier requests before the abort"
        await engine.deliver(aborted=["a"])
        assert (engine.ids, client.free) == (["a"], 0), "nothing is sent before the resume"
        await client.resume()
        await turns()
        assert engine.ids == ["a", "a", "b"], "in their order"
        await engine.deliver(rollout("a"), rollout("b"))
        await asyncio.gather(*first, *second)


# -- out of service, and back


async def test_a_withdrawn_engine_returns_its_requests_with_all_tokens_and_may_serve_again() -> None:
    client = client_over(2, slots=2)
    first, second = actors(client)
    collectors = [asyncio.create_task(client.collect(engine)) for engine in client.engines]
    client.enqueue([request("a"), request("b"), request("c")], lambda ended: None)
    await client.flush()
    assert (first.ids, second.ids) == (["a", "c"], ["b"])
    withdrawing = asyncio.create_task(client.withdraw(client.engines[0], 60.0))
    await turns()
    assert (first.aborts, second.aborts) == (1, 0)
    assert second.ids == ["b"], "its tokens have not arrived yet"
    first.put(segments=[segment("a", 0, 3)], aborted=["a", "c"])
    await withdrawing
    first.put()
    await collectors[0]
    await client.flush()
    assert second.ids == ["b", "a", "c"]
    assert [part.end for part in second.submitted[1].prefix] == [3]
    client.engines[0].serving = True
    client.enqueue([request("d")], lambda ended: None)
    await client.flush()
    assert (first.ids, first.cancelled) == (["a", "c", "d"], [])
    collectors[1].cancel()


async def test_requests_of_a_withdrawn_engine_that_does_not_answer_continue_from_what_it_has_reported() -> None:
    client = client_over(2)
    first, second = actors(client)
    collectors = [asyncio.create_task(client.collect(engine)) for engine in client.engines]
    client.enqueue([request("a")], lambda ended: None)
    await client.flush()
    await first.deliver(segments=[segment("a", 0, 2)])
    first.takes.clear()
    await client.withdraw(client.engines[0], 0.01)
    await turns()
    assert [part.end for part in second.submitted[0].prefix] == [2]
    first.put(segments=[segment("a", 2, 3)], aborted=["a"])
    await collectors[0]
    first.takes.set()
    client.engines[0].serving = True
    client.enqueue([request("b")], lambda ended: None)
    await client.flush()
    assert (first.cancelled, first.ids, second.ids) == (["a"], ["a", "b"], ["a"])
    collectors[1].cancel()


# -- callers


async def test_a_failure_is_raised_after_the_retries() -> None:
    async with connected_client(retries=1) as client:
        (engine,) = actors(client)
        (asking,) = await begun(client, request("a"))
        await engine.deliver(RolloutFailure("a", "first"), segments=[segment("a", 0, 2)])
        assert [asked.remaining_tokens for asked in engine.submitted] == [8, 6]
        await engine.deliver(RolloutFailure("a", "second"))
        with pytest.raises(GenerationFailed, match="second"):
            await asking
        assert client.running == 0


async def test_a_cancelled_caller_frees_the_engine() -> None:
    async with connected_client(slots=1, retries=5) as client:
        (engine,) = actors(client)
        tasks = await begun(client, *(request(name) for name in ("a", "b", "waits", "stays")))
        assert engine.ids == ["a", "b"]
        for task in (tasks[0], tasks[2]):
            task.cancel()
        await turns()
        assert engine.cancelled == ["a"], "a waiting request is on no engine"
        assert engine.ids == ["a", "b", "stays"], "its place is used by another request"
        await client.cancel(["unknown"])
        await engine.deliver(RolloutFailure("a", "cancelled"), rollout("b"), rollout("stays"))
        assert [task.cancelled() for task in tasks] == [True, False, True, False]
        assert engine.ids == ["a", "b", "stays"], "a cancelled request is not tried again"
        again = await begun(client, request("a"))
        await engine.deliver(rollout("a"))
        assert (await again[0]).rollout_id == "a"


async def test_callers_get_their_own_tokens_and_the_journal_those_of_enqueued_requests() -> None:
    async with connected_client() as client:
        (engine,) = actors(client)
        received: list[Segment] = []
        recorded: list[Segment] = []
        calls = await begun(client, request("7-0/0"), request("quiet"), on_segments=None)
        calls += await begun(client, request("7-1/0"), on_segments=received.extend)
        client.enqueue([request("7-2")], lambda ended: None, recorded.extend)
        client.enqueue([request(f"{EVALUATION}0")], lambda ended: None)
        await turns()
        news = [segment(name, 0, 2) for name in ("7-0/0", "7-1/0", "7-2", f"{EVALUATION}0")]
        await engine.deliver(segments=news)
        assert received == [news[1]]
        assert recorded == [news[2]]
        for call in calls:
            call.cancel()


# -- which engine, and when


async def test_an_engine_gets_slightly_more_than_it_runs_at_once_and_old_requests_first() -> None:
    async with connected_client(slots=8) as client:
        (engine,) = actors(client)
        names = [f"{number}" for number in range(1000)]
        tasks = await begun(client, *(request(name, priority=-int(name) // 2) for name in names))
        assert client.running == 1000
        assert client.free == 0
        assert len(engine.ids) == 10, "8, and a quarter"
        while len(engine.ids) < 1000:
            await engine.deliver(*(rollout(name) for name in engine.ids[-10:]))
        priorities = [asked.priority for asked in engine.submitted]
        assert priorities == sorted(priorities)
        among_equals = [int(name) for name in engine.ids if name != "0"]
        assert among_equals[:4] == [999, 997, 998, 995], "the oldest request first"
        await engine.deliver(*(rollout(name) for name in engine.ids[-10:]))
        assert {(await task).rollout_id for task in tasks} == set(names)
        assert client.free == 8


async def test_requests_of_one_affinity_stay_with_an_engine_while_it_serves_and_has_room() -> None:
    async def check(client: GenerationClient) -> None:
        first, second = actors(client)
        tasks = await begun(client, request("a/0", affinity="a"), request("b/0", affinity="b"))
        assert (first.ids, second.ids) == (["a/0"], ["b/0"])
        await second.deliver(rollout("b/0"))
        tasks += await begun(client, request("a/1", affinity="a"), request("a/2", affinity="a"))
        assert first.ids == ["a/0", "a/1", "a/2"], "although the other engine is idle"
        tasks += await begun(client, request("a/3", affinity="a"))
        assert second.ids[1:] == ["a/3"], "the first engine is full"
        tasks += await begun(client, request("a/4", affinity="a"))
        assert second.ids[1:] == ["a/3", "a/4"], "it has moved"
        client.mark_dead("engine-1", "it is slow")
        client.reclaim(client.engines[1])
        await first.deliver(*map(rollout, ("a/0", "a/1", "a/2")))
        assert first.ids[3:] == ["a/3", "a/4"]
        for task in tasks:
            task.cancel()

    client = client_over(2, slots=2)
    async with asyncio.TaskGroup() as group:
        collectors = [group.create_task(collected(client, number)) for number in range(2)]
        await check(client)
        for collector in collectors:
            collector.cancel()


async def collected(client: GenerationClient, number: int) -> None:
    """Collect from an engine until it is lost."""
    with suppress(EngineLost):
        await client.collect(client.engines[number])


# -- random sequences of events


@pytest.mark.slow
@given(data=st.data(), engines=st.integers(1, 2), budgets=st.lists(st.integers(1, 8), min_size=1, max_size=4))
@settings(deadline=None, max_examples=40)
def test_whatever_engines_abandon_each_caller_gets_one_complete_rollout(
    data: st.DataObject, engines: int, budgets: list[int]
) -> None:
    """With aborts, failures, deaths, pauses and engines that join and leave, after any number of tokens: nothing is
    lost or sampled twice. Engines may be lost without a new token again and again."""

    async def check() -> None:
        client = client_over(engines, retries=10_000, slots=2)
        requests = [request(f"r{number}", max_tokens=budget) for number, budget in enumerate(budgets)]
        received: list[Segment] = []
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(client.generate(asked, received.extend)) for asked in requests]
            collectors = {number: group.create_task(collected(client, number)) for number in range(engines)}
            gone: list[Any] = []
            await turns()
            version = 0
            while client.running:
                event = data.draw(st.sampled_from(["finish", "abort", "grow", "fail", "die", "pause", "leave"]))
                version += data.draw(st.integers(0, 1))
                if event == "pause":
                    await client.pause()
                number = data.draw(st.integers(0, engines - 1))
                actor, pending = actors(client)[number], client.engines[number].pending
                leaving = []
                if event == "leave":
                    leaving = [group.create_task(client.withdraw(client.engines[number], 60.0))]
                    await turns()
                news, ends = [], []
                for name, entry in pending.items():
                    start = entry.tokens.end
                    left = entry.request.sampling.max_tokens - start
                    reported = entry.tokens.segments[len(entry.request.prefix) :]
                    new = left if event == "finish" else data.draw(st.integers(0, left))
                    part = [segment(name, start, new, version=version)] if new else []
                    if event == "finish":
                        ends.append(complete(entry.request, *reported, *part, reason="length"))
                    else:
                        news += part
                aborted = list(pending) if event in ("abort", "pause", "leave") else []
                failures = [RolloutFailure(name, "no") for name in pending] if event == "fail" else []
                actor.put(*ends, *failures, segments=news, aborted=aborted)
                if not leaving:  # nothing more is collected from an engine that has left
                    await actor.processed()
                for left in leaving:
                    await left
                    gone.append((actor, len(actor.ids)))
                    collectors[number].cancel()
                    actor.forget_collector()
                    client.remove(client.engines[number])
                    joined = client.add(StandInProcess("joined"))
                    client.engines.insert(number, client.engines.pop())  # at the same index, which the draws above use
                    joined.serving = True
                    collectors[number] = group.create_task(collected(client, number))
                if event == "die":
                    actor.die()
                    await collectors[number]
                    client.reclaim(client.engines[number])
                    process: Any = client.engines[number].process
                    await process.replace()
                    client.engines[number].serving = True
                    collectors[number] = group.create_task(collected(client, number))
                if event == "pause":
                    for other in set(range(engines)) - {number}:
                        await actors(client)[other].deliver(aborted=list(client.engines[other].pending))
                    await client.resume()
                await turns()
            for number, collector in collectors.items():
                collector.cancel()
                actors(client)[number].forget_collector()
        for asked, task in zip(requests, tasks, strict=True):
            answer = task.result()
            assert answer.ids.tolist() == list(range(5, 5 + asked.sampling.max_tokens))
            assert (answer.prompt_ids, answer.finish_reason) == (asked.prompt_ids, "length")
            assert answer.text == text_of(answer.ids)
            assert sorted(answer.versions) == answer.versions.tolist()
        assert all(len(actor.ids) == count for actor, count in gone), "an engine that has left gets no requests"
        for actor in actors(client):
            assert all(asked.remaining_tokens > 0 for asked in actor.submitted)
        ranges = [(part.rollout_id, token) for part in received for token in range(part.start, part.end)]
        assert len(ranges) == len(set(ranges)), "each token is reported once"

    with patch("asyncrl_cli.rollout.client.MOST_LOSSES", 10**9):
        run(check())


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


# -- routing in bulk


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


async def test_a_request_that_kills_every_engine_fails_and_others_of_these_engines_continue() -> None:
    client = client_over(1)
    owner = Owner()
    await asked(client, owner, "a", "b", "fatal")
    for _ in range(2):
        actors(client)[0].die()
        await lost(client, 0)
        engine = await restart(client.engines[0])
        await client.flush()
    assert engine.ids == ["a"], "any of them may be the cause, so an engine gets one at a time"
    await asked(client, owner, "new")
    assert engine.ids == ["a", "new"], "others do not wait for that"
    async with collecting(client):
        await engine.deliver(rollout("new"), segments=[segment("a", 0, 1)])
        assert engine.ids == ["a", "new", "b"], "a new token shows that it is not the cause"
        await engine.deliver(rollout("b"))
    assert engine.ids == ["a", "new", "b", "fatal"]
    engine.die()
    await lost(client, 0)
    reason = "3 engines in a row were lost while they ran this request; see engine-0.log"
    assert owner.failures == [RolloutFailure("fatal", reason)]
    engine = await restart(client.engines[0])
    await client.flush()
    assert [ranges(request) for request in engine.submitted] == [[(0, 1)]]


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


# -- what is recorded of an engine's work


async def test_every_token_is_counted_at_the_engine_that_sampled_it() -> None:
    stays: list[EngineRequest] = []
    client = client_over(1, on_engine_request=stays.append)
    (engine,) = actors(client)
    await asked(client, Owner(), "a", "b")
    async with collecting(client):
        await engine.deliver(segments=[segment("a", 0, 3)])
        returned = [Placement("a", 9.0, 2.0, 1)]
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
    running = [(stay.running_from, stay.running_until) for stay in stays]
    first, _, last, _ = running
    assert running[1] == running[3] == (None, None)
    assert first[1] - first[0] == pytest.approx(7.0)  # type: ignore[operator]
    assert last[1] - last[0] == pytest.approx(3.0)  # type: ignore[operator]
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


# -- random sequences of events, in bulk


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

    with (
        patch("asyncrl_cli.rollout.client.MOST_LOSSES", 10**9),
        patch("asyncrl_cli.rollout.open_requests.MOST_LOSSES", 10**9),
    ):
        run(check())
