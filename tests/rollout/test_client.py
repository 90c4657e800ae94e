"""Abort and continue: whatever engines abandon, each caller gets one complete rollout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.records.generation import (
    EVALUATION,
    FinishReason,
    Rollout,
    RolloutFailure,
    RolloutRequest,
    Sampling,
    Segment,
)
from asyncrl_cli.rollout.client import EngineLost, GenerationClient, GenerationFailed
from asyncrl_cli.rollout.continuation import finished
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


async def test_an_abort_with_a_token_then_without_one_then_a_stop() -> None:
    async with connected_client() as client:
        (engine,) = actors(client)
        (asking,) = await begun(client, request("a"))
        await engine.deliver(segments=[segment("a", 0, 1)], aborted=["a"])
        await engine.deliver(aborted=["a"])
        assert [asked.remaining_tokens for asked in engine.submitted] == [8, 7, 7]
        assert engine.submitted[1] == engine.submitted[2], "an abort without a token changes nothing"
        await engine.deliver(complete(engine.submitted[2], segment("a", 1, 3, version=1)))
        answer = await asking
        assert answer.ids.tolist() == [5, 6, 7, 8]
        assert answer.versions.tolist() == [0, 1, 1, 1]
        assert answer.logprobs.tolist() == [-0.5] * 4
        assert answer.text == "<5><6><7><8>"
        assert answer.finish_reason == "stop"
        assert answer.prompt_ids == (1, 2)


async def test_a_budget_spent_at_the_abort_ends_the_rollout() -> None:
    async with connected_client() as client:
        (engine,) = actors(client)
        (asking,) = await begun(client, request("a"))
        await engine.deliver(segments=[segment("a", 0, 3)], aborted=["a"])
        await engine.deliver(segments=[segment("a", 3, 5, version=2)], aborted=["a"])
        answer = await asking
        assert [asked.remaining_tokens for asked in engine.submitted] == [8, 5], "no request for 0 tokens"
        assert answer.finish_reason == "length"
        assert answer.versions.tolist() == [0] * 3 + [2] * 5
        assert answer.text == text_of(range(5, 13))
        assert client.running == 0


async def test_a_stop_string_across_a_boundary_ends_the_rollout() -> None:
    async with connected_client() as client:
        (engine,) = actors(client)
        asked = replace(request("a"), sampling=Sampling(1.0, 8, stop=("7><8",)))
        (asking,) = await begun(client, asked)
        await engine.deliver(segments=[segment("a", 0, 3)], aborted=["a"])
        await engine.deliver(segments=[segment("a", 3, 5)], aborted=["a"])
        answer = await asking
        assert (answer.text, answer.finish_reason) == ("<5><6><", "stop")
        assert len(answer.logprobs) == len(answer.versions) == 4


def test_a_character_of_several_tokens_survives_a_boundary() -> None:
    """Each token is a byte; the text is decoded once, from all of them."""
    letters = "é🙂".encode()
    parts = [letters[:1], letters[1:4], letters[4:]]

    def decode(ids: Any) -> str:
        return bytes(ids.tolist()).decode()

    asked = RolloutRequest("a", (1,), Sampling(1.0, 8))
    for part in parts:
        tail = segment("a", asked.generated, len(part))
        asked = replace(asked, prefix=(*asked.prefix, replace(tail, ids=tail.ids * 0 + list(part))))
    assert finished(asked, [], "length", decode).text == "é🙂"


async def test_a_pause_aborts_on_every_engine_and_sends_nothing_before_the_resume() -> None:
    async with connected_client(engines=2) as client:
        first, second = actors(client)
        asking = await begun(client, request("a"), request("b"), request("c"))
        for pause in (1, 2):
            running = [list(engine.pending) for engine in client.engines]
            sent = len(first.ids + second.ids)
            await client.pause()
            assert (first.aborts, second.aborts) == (pause, pause)
            for actor, names in zip((first, second), running, strict=True):
                news = [segment(name, pause - 1, 1, version=pause) for name in names if name in "ab"]
                await actor.deliver(segments=news, aborted=names)
            asking += await begun(client, request(f"later-{pause}"))
            assert client.free == 0
            assert len(first.ids + second.ids) == sent
            await client.resume()
            await turns()
            assert len(first.ids + second.ids) == sent + 3 + pause
        last = {asked.rollout_id: asked for engine in (first, second) for asked in engine.submitted}
        assert [last[name].remaining_tokens for name in ("a", "b", "c", "later-1", "later-2")] == [6, 6, 8, 8, 8]
        for name, asked in last.items():
            rest = segment(name, asked.generated, asked.remaining_tokens, version=3)
            await at(client, name).deliver(complete(asked, rest, reason="length"))
        answers = await asyncio.gather(*asking)
        assert [answer.versions.tolist()[:3] for answer in answers[:3]] == [[1, 2, 3], [1, 2, 3], [3, 3, 3]]
        assert all(answer.ids.tolist() == list(range(5, 13)) for answer in answers)


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
        await client.resume()
        await turns()
        assert engine.ids == ["a", "a", "b"], "in their order"
        await engine.deliver(rollout("a"), rollout("b"))
        await asyncio.gather(*first, *second)


async def test_an_engine_that_does_not_abort_is_marked_dead_and_its_requests_continue_elsewhere() -> None:
    client = client_over(2, hang_s=0.01)
    first, second = actors(client)
    client.enqueue([request("a"), request("b")], lambda ended: None)
    await client.flush()
    first.takes.clear()
    await client.pause()
    assert first.dead
    with pytest.raises(EngineLost):
        await client.collect(client.engines[0])
    client.reclaim(client.engines[0])
    assert second.ids == ["b"]
    await client.resume()
    await client.flush()
    assert second.ids == ["b", "a"]


async def test_an_engine_that_restarts_during_a_pause_gets_nothing_before_the_resume() -> None:
    client = client_over(1)
    (engine,) = actors(client)
    client.enqueue([request("a")], lambda ended: None)
    await client.flush()
    await client.pause()
    engine.die()
    with pytest.raises(EngineLost):
        await client.collect(client.engines[0])
    client.reclaim(client.engines[0])
    process: Any = client.engines[0].process
    await process.replace()
    client.engines[0].serving = True
    await client.flush()
    assert process.actor.ids == []
    await client.resume()
    await client.flush()
    assert process.actor.ids == ["a"]


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
    assert await withdrawing
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
    assert not await client.withdraw(client.engines[0], 0.01)
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


async def test_an_unsent_request_of_a_withdrawn_engine_waits_for_another() -> None:
    client = client_over(1)
    (engine,) = actors(client)
    engine.takes.clear()
    client.enqueue([request("a")], lambda ended: None)
    await turns()
    client.enqueue([request("b")], lambda ended: None)
    await turns()
    withdrawing = asyncio.create_task(client.withdraw(client.engines[0], 0.01))
    await turns()
    engine.takes.set()
    await withdrawing
    await turns()
    assert engine.ids == ["a"]
    assert client.running == 2


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
    async with connected_client(slots=1) as client:
        (engine,) = actors(client)
        tasks = await begun(client, *(request(name) for name in ("a", "b", "waits", "stays")))
        assert engine.ids == ["a", "b"]
        for task in (tasks[0], tasks[2]):
            task.cancel()
        await turns()
        assert engine.cancelled == ["a"], "a waiting request is on no engine"
        assert engine.ids == ["a", "b", "stays"], "its place is used by another request"
        await engine.deliver(rollout("a"), rollout("b"), rollout("stays"))
        assert [task.cancelled() for task in tasks] == [True, False, True, False]
        again = await begun(client, request("a"))
        await engine.deliver(rollout("a"))
        assert (await again[0]).rollout_id == "a"


async def test_an_open_requests_id_is_refused() -> None:
    async with connected_client() as client:
        (engine,) = actors(client)
        (first,) = await begun(client, request("a"))
        with pytest.raises(ValueError, match="request a is already open"):
            await client.generate(request("a"))
        await engine.deliver(rollout("a"))
        await first


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


async def test_waiting_requests_go_to_any_engine_with_room() -> None:
    async with connected_client(engines=2, slots=1) as client:
        busy, quick = actors(client)
        tasks = await begun(client, *(request(f"{number}") for number in range(9)))
        assert (len(busy.ids), len(quick.ids)) == (2, 2)
        while len(quick.ids) < 7:
            await quick.deliver(rollout(quick.ids[-1]))
        assert len(busy.ids) == 2
        for task in tasks:
            task.cancel()


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
    lost or sampled twice."""

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
                    assert await left, "it has returned all requests"
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
            assert answer.finish_reason == "length"
            assert answer.text == text_of(answer.ids)
            assert sorted(answer.versions) == answer.versions.tolist()
        assert all(len(actor.ids) == count for actor, count in gone), "an engine that has left gets no requests"
        for actor in actors(client):
            assert all(asked.remaining_tokens > 0 for asked in actor.submitted)
        ranges = [(part.rollout_id, token) for part in received for token in range(part.start, part.end)]
        assert len(ranges) == len(set(ranges)), "each token is reported once"

    run(check())
