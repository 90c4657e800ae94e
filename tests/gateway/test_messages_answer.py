"""Answers and events of the Messages API match the types of Anthropic's package, and a stream yields the answer."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message as TheirMessage
from anthropic.types import RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from gateway_stand_ins import KEY, Engine, key_of, served
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter
from test_messages_blocks import replies

from asyncrl_cli.gateway.errors import ApiError
from asyncrl_cli.gateway.messages_reply import MessagesAnswer
from asyncrl_cli.gateway.reply_stream import FIELDS, ReplyPart
from asyncrl_cli.gateway.session import Reply
from asyncrl_cli.records.prompt import Message

pytestmark = pytest.mark.slow

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def answer_of(*stops: str, text: str = "") -> MessagesAnswer:
    return MessagesAnswer("tiny", 7, stops, lambda _: text)


def reply_of(message: Message, finish_reason: Any = "stop") -> Reply:
    finish_reason = "tool_calls" if message.get("tool_calls") else finish_reason
    return Reply(message, "", (1,) * 7, (2, 3), np.zeros(2, np.float32), finish_reason)


def unknown(model: Any, path: str = "") -> list[str]:
    """Keys that Anthropic's types do not have."""
    if isinstance(model, list):
        return [name for one in model for name in unknown(one, path)]
    if not isinstance(model, BaseModel):
        return []
    known = [name for field in type(model).model_fields for name in unknown(getattr(model, field), f"{path}.{field}")]
    return [f"{path}.{name}" for name in model.model_extra or ()] + known


def parsed(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each with its name in its data."""
    events = []
    for event in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@st.composite
def pieces(draw: st.DrawFn, message: Message) -> list[ReplyPart]:
    """A reply's texts in pieces, as a session delivers them: reasoning first."""
    parts = []
    for kind, name in FIELDS.items():
        text = message.get(name) or ""
        cuts = sorted({0, len(text), *draw(st.lists(st.integers(0, len(text)), max_size=3))})
        parts += [ReplyPart(kind, text[one:other]) for one, other in pairwise(cuts)]
    return parts


@given(replies(), st.data())
def test_a_stream_adds_up_to_the_answer(message: Message, data: st.DataObject) -> None:
    reply = reply_of(message)
    whole = answer_of().complete([[reply]])
    theirs = TheirMessage.model_validate(json.loads(json.dumps(whole)))
    assert unknown(theirs) == []
    answer = answer_of()
    stream = b"".join(answer.part_events(0, part) for part in data.draw(pieces(message)))
    stream += answer.closing(0, reply) + answer.end([[reply]])
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    events = parsed(stream)
    for body in events:
        event = EVENT.validate_python(body)
        assert unknown(event) == []
        if event.type != "message_stop":
            snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    streamed = TheirMessage.model_validate(snapshot.to_dict())
    assert streamed.model_dump(exclude={"id"}) == theirs.model_dump(exclude={"id"})
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    index, is_open = -1, False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            index, is_open = index + 1, True
        assert is_open, "every delta is in a block"
        assert event["index"] == index
        is_open = event["type"] != "content_block_stop"
    assert not is_open


@pytest.mark.parametrize(
    ("finish", "stops", "text", "expected"),
    [
        ("stop", (), "done", ("end_turn", None)),
        ("stop", ("##", "#"), "a ##", ("stop_sequence", "#")),
        ("stop", ("x", "##"), "a ##", ("stop_sequence", "##")),
        ("stop", ("x",), "the session's own: !!", ("end_turn", None)),
        ("length", ("x",), "on and", ("max_tokens", None)),
        ("tool_calls", ("##",), "call ##", ("tool_use", None)),
    ],
)
def test_stop_reason_of_a_reply(
    finish: Any, stops: tuple[str, ...], text: str, expected: tuple[str, str | None]
) -> None:
    answer = answer_of(*stops, text=text)
    whole = answer.complete([[reply_of({"content": "a"}, finish)]])
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "context_length_exceeded", "invalid_request_error"),
        (401, "invalid_api_key", "authentication_error"),
        (404, "session_not_found", "not_found_error"),
        (408, "request_timeout", "timeout_error"),
        (410, "session_ended", "not_found_error"),
        (503, "generation_failed", "api_error"),
    ],
)
def test_errors_fit_the_types(status: int, code: str, kind: str) -> None:
    error = ApiError(status, "so it is", code=code)
    answer = answer_of()
    (event,) = parsed(answer.failed(error))
    body = error.for_anthropic(answer.headers["request-id"])
    assert event == body
    theirs = ErrorResponse.model_validate(body)
    assert theirs.error.type == kind
    assert body["error"]["message"].endswith("so it is")
    assert body["error"]["details"] == {"error_code": code}


ASKED: Any = {"max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}


async def test_keys_come_in_either_header() -> None:
    async with served() as there:
        there.session("7-0")
        there.http.headers.clear()
        both = {"x-api-key": key_of("7-0"), "authorization": "Bearer of-another-user"}
        path = "/v1/messages?beta=true"
        for session, headers in (
            ("", {"x-api-key": KEY}),
            ("", {"authorization": f"Bearer {KEY}"}),
            ("/sessions/7-0", both),
        ):
            answer = await there.http.post(session + path, json=ASKED, headers=headers)
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_deep_arguments_are_a_call_like_any_other(stream: bool) -> None:
    deep = "[" * 800 + "1" + "]" * 800
    call = '<tool_call>{"name": "find", "arguments": {"a": ' + deep + "}}</tool_call>"
    engine = Engine(lambda *_: call)
    async with served(engine) as there:
        asked = ASKED | {
            "tools": [{"name": "find", "input_schema": {"type": "object"}}],
            "stream": stream,
            "max_tokens": 2_000,
        }
        answer = await there.post("/v1/messages", asked)
        assert answer.status_code == 200, answer.text
        assert "[" * 800 + "1]" in answer.text.replace("\\", "")
        assert '"stop_reason":"tool_use"' in answer.text
