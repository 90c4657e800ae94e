"""Programs outside of the run: the paths that they use, and sessions that outlive the gateway."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

import pytest

from asyncrl_cli.gateway.session import CallOptions, Session, SessionLimits, SessionRecord
from asyncrl_cli.gateway.sessions import Action, ClientAnswer, ClientRequest, OutsideClients
from asyncrl_cli.records.generation import Rollout, Sampling
from tests.gateway.conversation_stand_ins import HashModel, Record, ask_chat, character_chat
from tests.gateway.gateway_stand_ins import served, until

TOKEN = "of the run"
CHAT = character_chat()
LIMITS = SessionLimits(max_length=4000, max_call_tokens=300)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def session(model: HashModel, record: Record, **options: Any) -> Session:
    return Session(
        "3-1",
        CHAT,
        model.generate,
        Sampling(temperature=1.0, max_tokens=300, seed=3),
        LIMITS,
        fixed_sampling=True,
        record=SessionRecord(on_segments=record.add, **options),
    )


async def talk(open_session: Session, messages: list[Any], turns: int) -> list[Any]:
    """Continue a conversation; returns all its messages."""
    for turn in range(turns):
        messages = [*messages, user(f"question {len(messages)} {turn}")]
        (reply,) = await ask_chat(open_session, messages, None, CallOptions())
        messages.append({"role": "assistant", "content": reply.message["content"]})
    return messages


def ids_of(rollout: Rollout | None) -> list[tuple[list[int], list[bool]]]:
    assert rollout is not None
    return [(sequence.ids.tolist(), sequence.sampled.tolist()) for sequence in rollout.sequences]


@pytest.mark.parametrize("turns", [1, 3])
async def test_a_program_continues_its_conversation_after_the_gateway_was_lost(turns: int) -> None:
    record, model = Record(), HashModel(CHAT)
    whole = session(model, record)
    other = await talk(whole, [], 1)
    messages = await talk(whole, [user("another history")], turns)
    again_record = Record()
    for segments in record.recorded().values():
        again_record.add(list(segments))
    count = len(model.requests)
    again = session(model, again_record, segments=record.recorded(), continues=True)
    assert again.has_reply
    assert (again.calls, again.sampled_tokens) == (whole.calls, whole.sampled_tokens)
    assert ids_of(again.rollout()) == ids_of(whole.rollout()), "kept, whether or not the program calls again"
    messages = await talk(again, messages, 2)
    assert len(model.requests) == count + 2, "no earlier reply was sampled again"
    with patch.object(again, "_render_chat", wraps=again._render_chat) as rendered:
        await talk(again, messages, 1)
    assert rendered.await_count == 1, "no earlier prompt is rendered again"
    first, second = ids_of(again.rollout())
    assert first == ids_of(whole.rollout())[0], "the other conversation is unchanged"
    earlier = ids_of(whole.rollout())[1]
    assert second[0][: len(earlier[0])] == earlier[0]
    assert second[1][: len(earlier[1])] == earlier[1]
    assert len(second[0]) > len(earlier[0])
    await talk(again, other, 1)
    assert next(len(ids) for ids, _ in ids_of(again.rollout())) > len(first[0])
    assert len(ids_of(again.rollout())) == 2, "no branch was begun"


async def test_a_program_that_changes_its_history_begins_a_branch_and_loses_no_recorded_reply() -> None:
    record, model = Record(), HashModel(CHAT)
    whole = session(model, record)
    messages = await talk(whole, [], 3)
    again = session(model, Record(), segments=record.recorded(), continues=True)
    changed = [*messages[:2], user("something else")]
    await ask_chat(again, changed, None, CallOptions())
    kept, branch = ids_of(again.rollout())
    assert kept == ids_of(whole.rollout())[0]
    assert sum(branch[1]) == len(model.requests[-1][1].ids), "only its last reply is trained in the branch"
    assert sum(len(segment.ids) for segment in record.recorded()[0]) == len(kept[0])


async def test_a_repeated_call_gets_the_recorded_reply() -> None:
    record, model = Record(), HashModel(CHAT)
    (reply,) = await ask_chat(session(model, record), [user("hello")], None, CallOptions())
    again = session(model, Record(), segments=record.recorded(), continues=True)
    (repeated,) = await ask_chat(again, [user("hello")], None, CallOptions())
    assert repeated.token_ids == reply.token_ids
    assert len(model.requests) == 1


async def test_a_reply_is_sent_after_its_tokens_are_recorded() -> None:
    record, recorded = Record(), asyncio.Event()

    async def until_recorded() -> None:
        assert record.recorded(), "its tokens are reported first"
        await recorded.wait()

    open_session = session(HashModel(CHAT), record, continues=True, until_recorded=until_recorded)
    asking = asyncio.create_task(ask_chat(open_session, [user("hello")], None, CallOptions()))
    await until(lambda: open_session.has_reply)
    assert not asking.done()
    recorded.set()
    assert await asking


async def test_paths_for_programs_check_keys_and_bodies() -> None:
    asked: list[ClientRequest] = []
    answers: dict[Action, ClientAnswer] = {
        Action.OPEN: ClientAnswer(200, {"session": "7-0"}),
        Action.REWARD: ClientAnswer(200, {"status": "recorded"}),
        Action.GIVE_UP: ClientAnswer(410, {"message": "session 7-0 has ended: late"}, "session_ended"),
    }

    async def ask(request: ClientRequest) -> ClientAnswer:
        asked.append(request)
        return answers[request.action]

    async with served(clients=OutsideClients(TOKEN, ask)) as run:
        run.session("7-0")
        token = {"headers": {"Authorization": f"Bearer {TOKEN}"}}
        assert (await run.post("/sessions", {})).json()["error"]["code"] == "invalid_api_key"
        assert (await run.post("/sessions", {}, **token)).json() == {"session": "7-0"}
        own = {"prompt": [user("1+1=")], "fields": {"answer": 2}}
        assert (await run.post("/sessions", own, **token)).status_code == 200
        assert (asked[-1].prompt, asked[-1].fields) == (own["prompt"], own["fields"])
        for body in ({"prompt": 3}, {"promt": "a"}, {"fields": []}):
            assert (await run.post("/sessions", body, **token)).status_code == 400
        # A session's key opens nothing but the session, and the run's token is no session's key.
        assert (await run.post("/reward", {"reward": 1.0}, "7-0")).json() == {"status": "recorded"}
        assert not asked[-1].has_reply
        for wrong in (TOKEN, "x", "7-0"):
            headers = {"headers": {"Authorization": f"Bearer {wrong}"}}
            assert (await run.post("/reward", {"reward": 1.0}, "7-0", **headers)).status_code == 401
            assert (await run.http.delete("/sessions/7-0", **headers)).status_code == 401
        await run.client("7-0").completions.create(model="any", prompt="hello")
        assert (await run.post("/reward", {"reward": None, "metrics": {"a": 1}}, "7-0")).status_code == 200
        assert asked[-1] == ClientRequest(Action.REWARD, "7-0", reward=None, metrics={"a": 1.0})
        count = len(asked)
        for body in ({}, {"reward": "1"}, {"reward": True}, {"reward": 1, "metric": {}}, {"reward": 1, "metrics": 2}):
            refused = await run.post("/reward", body, "7-0")
            assert refused.status_code == 400, refused.text
        for number in ("NaN", "1e999"):
            refused = await run.post("/reward", content=f'{{"reward": {number}}}', session="7-0")
            assert refused.json()["error"]["param"] == "reward"
        assert len(asked) == count
        key = run.client("7-0").api_key
        ended = await run.http.delete("/sessions/7-0", headers={"Authorization": f"Bearer {key}"})
        assert (ended.status_code, ended.json()["error"]["code"]) == (410, "session_ended")
        answers[Action.OPEN] = ClientAnswer(503, {"message": "ask again"}, "no_session")
        busy = await run.post("/sessions", {}, **token)
        assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
    async with served() as run:
        assert (await run.post("/sessions", {}, **token)).status_code == 404, "the run has another task"


async def test_a_call_waits_until_its_session_is_open_again() -> None:
    async def ask(request: ClientRequest) -> ClientAnswer:
        raise AssertionError

    async with served(clients=OutsideClients(TOKEN, ask)) as run:
        calling = asyncio.create_task(run.client("7-0").completions.create(model="any", prompt="hello"))
        run.session("8-0")
        await run.client("8-0").completions.create(model="any", prompt="hello")
        assert not calling.done()
        run.session("7-0")
        assert (await calling).choices[0].text


async def test_a_program_that_leaves_is_no_longer_waited_for() -> None:
    begun, cancelled = asyncio.Event(), False

    async def ask(request: ClientRequest) -> ClientAnswer:
        nonlocal cancelled
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled = True
            raise
        raise AssertionError

    async with served(clients=OutsideClients(TOKEN, ask)) as run:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        asking = asyncio.create_task(run.http.post("/sessions", json={}, headers=headers))
        await begun.wait()
        asking.cancel()
        await until(lambda: cancelled)
