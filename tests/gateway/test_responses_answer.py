"""Every answer and every stream of events is valid for OpenAI's own models, and a stream yields its response."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from gateway_stand_ins import chat_format
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from test_messages_answer import pieces
from test_responses_items import TOOLS, replies

from asyncrl_cli.gateway.errors import ApiError
from asyncrl_cli.gateway.reply_stream import ReplyPart
from asyncrl_cli.gateway.responses_reply import ResponsesAnswer, begun_response
from asyncrl_cli.gateway.responses_request import ResponsesRequest
from asyncrl_cli.gateway.session import Reply
from asyncrl_cli.records.prompt import Message

pytestmark = pytest.mark.slow

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def reply_of(message: Message, cut: bool = False) -> Reply:
    reasoning = message.get("reasoning_content") or ""
    text = f"{reasoning}|{message['content'] or ''}"
    ids = tuple(chat_format().encode("".join(char for char in text if char.isascii())))
    finish: Any = "tool_calls" if message.get("tool_calls") else "length" if cut else "stop"
    return Reply(message, text, (1, 2, 3), ids, np.zeros(len(ids), np.float32), finish)


def answer_of(kept: dict[str, Message] | None = None, **body: Any) -> ResponsesAnswer:
    asked = ResponsesRequest.model_validate({"input": "", "tools": TOOLS, **body})
    keep = None if kept is None else kept.__setitem__
    begun = begun_response(asked, "tiny", fixed_sampling=False)
    begun["id"] = "resp_stem"
    return ResponsesAnswer(begun, asked.client_tools(), chat_format().decode, token_ids=False, keep=keep)


def parsed(stream: bytes) -> list[Any]:
    blocks = stream.decode().removesuffix("\n\n").split("\n\n")
    events = [json.loads(block.partition("\ndata: ")[2]) for block in blocks]
    for event in events:
        EVENT.validate_python(event, strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


@given(replies(), st.booleans(), st.data())
def test_a_stream_adds_up_to_the_complete_answer(message: Message, cut: bool, data: st.DataObject) -> None:
    reply = reply_of(message, cut)
    complete: Any = answer_of().complete([[reply]])
    Response.model_validate(complete, strict=True)

    kept: dict[str, Message] = {}
    answer = answer_of(kept)
    stream = b"".join(answer.part_events(0, part) for part in data.draw(pieces(message)))
    events = parsed(stream + answer.closing(0, reply) + answer.end([[reply]]))

    first, second, *between, last = events
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    assert last["type"] == f"response.{complete['status']}"
    assert last["response"] | {"created_at": 0} == complete | {"created_at": 0}
    assert kept == {complete["id"]: message}
    deltas = [""] * len(complete["output"])
    done = []
    for event in between:
        assert event["output_index"] == len(done), "one item after the other"
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] += event["delta"]
        if event["type"] == "response.output_item.done":
            done.append(event["item"])
    assert done == complete["output"]
    for delta, item in zip(deltas, complete["output"], strict=True):
        texts = [part["text"] for part in item.get("content", ())]
        assert delta == "".join(texts) + item.get("arguments", "") + item.get("input", "")


def test_a_failure_ends_the_stream() -> None:
    for error, code in ((ApiError(503, "gone"), "server_error"), (ApiError(410, "gone"), "invalid_prompt")):
        answer = answer_of()
        events = parsed(answer.part_events(0, ReplyPart("content", "a")) + answer.failed(error))
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["status"] == "failed"
        assert events[-1]["response"]["error"] == {"code": code, "message": "gone"}
