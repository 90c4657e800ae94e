"""The items of a reply that is sent back give the reply's message: otherwise its tokens could not be continued."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.gateway.errors import ApiError
from asyncrl_cli.gateway.responses_reply import items_of
from asyncrl_cli.gateway.responses_request import ResponsesRequest
from asyncrl_cli.gateway.wire import MAX_CALLS
from asyncrl_cli.records.prompt import Message, normalized

TOOLS: Any = [
    {"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": True},
    {"type": "custom", "name": "patch", "description": "Edits."},
    {
        "type": "namespace",
        "name": "files",
        "description": "",
        "tools": [{"type": "function", "name": "find"}, {"type": "custom", "name": "patch"}],
    },
]
OWN = {own.chat_name: own for own in ResponsesRequest.model_validate({"input": "", "tools": TOOLS}).client_tools()}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.one_of(TEXTS, st.integers(), st.booleans(), st.none())
ARGUMENTS = st.one_of(
    st.dictionaries(TEXTS, VALUES, max_size=2), TEXTS.map(lambda text: {"input": text}), st.just({"input": "\ud800"})
)


def call(name: str, arguments: Any, spaces: bool, call_id: str) -> dict[str, Any]:
    text = json.dumps(arguments, indent=2 if spaces else None)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


CALLS = st.lists(
    st.builds(call, st.sampled_from([*OWN, "other.tool"]), ARGUMENTS, st.booleans(), st.sampled_from(["c1", "c2"])),
    max_size=3,
)


@st.composite
def replies(draw: Any) -> Message:
    """Results of ``ChatFormat.parse`` for a reply."""
    message: dict[str, Any] = {"role": "assistant", "content": draw(TEXTS)}
    if calls := draw(CALLS):
        message = {"role": "assistant", "content": message["content"] or None, "tool_calls": calls}
    if reasoning := draw(TEXTS):
        message["reasoning_content"] = reasoning
    return message


OTHERS = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "system"]), TEXTS),
    st.builds(lambda text: {"role": "tool", "tool_call_id": "c1", "content": text}, TEXTS),
)


def item_of(message: Message) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
    return {"role": message["role"], "content": [{"type": "input_text", "text": message["content"]}]}


def as_others_send_it(item: Any) -> dict[str, Any]:
    """As Codex sends it: without ids, and with reasoning in the encrypted form only."""
    left = {key: value for key, value in item.items() if key not in ("id", "status")}
    return {key: value for key, value in left.items() if key != "content"} if item["type"] == "reasoning" else left


def compared(message: Message) -> dict[str, Any]:
    """The parts of a message that sessions compare, and the reasoning."""
    same = dict(normalized(message))
    return same | {"reasoning_content": message["reasoning_content"]} if message.get("reasoning_content") else same


@given(st.lists(st.tuples(st.lists(OTHERS, min_size=1, max_size=3), replies()), max_size=4), st.booleans())
def test_items_sent_back_are_the_same_messages(turns: list[tuple[list[Message], Message]], plain: bool) -> None:
    items: list[Any] = []
    for number, (others, reply) in enumerate(turns):
        items += map(item_of, others)
        answered = items_of(reply, OWN, f"stem{number}")
        items += map(as_others_send_it, answered) if plain else answered
    body = ResponsesRequest.model_validate_json(json.dumps({"input": items}))
    messages = [message for others, reply in turns for message in (*others, reply)]
    assert [compared(message) for message in body.chat_messages()] == [compared(message) for message in messages]


def messages(*items: Any) -> list[Message]:
    return ResponsesRequest.model_validate({"input": list(items)}).chat_messages()


def test_items_of_one_reply_are_one_message() -> None:
    reply = {"role": "assistant", "content": "a"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    called = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    assert [message.keys() for message in messages(thought, reply, called, called)] == [
        {"role", "content", "reasoning_content", "tool_calls"}
    ]
    assert len(messages(reply, reply)) == 2
    assert len(messages(called, reply)) == 2
    assert len(messages(called, thought)) == 2
    assert messages({"type": "reasoning", "summary": []}) == []


def test_a_reply_has_as_many_calls_as_a_message_of_chat_may_have() -> None:
    one = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    (message,) = messages(*[one] * MAX_CALLS)
    assert len(message["tool_calls"]) == MAX_CALLS
    with pytest.raises(ApiError, match="more than 512 calls"):
        messages(*[one] * (MAX_CALLS + 1))


def test_reasoning_of_another_server_is_refused() -> None:
    with pytest.raises(ApiError, match="not from this server"):
        messages({"type": "reasoning", "summary": [], "encrypted_content": "gAAAA?"})


def test_the_model_sees_a_custom_tool_as_a_function_with_its_grammar() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
    patch = {"type": "custom", "name": "patch", "description": "Edits.", "format": grammar}
    find = {"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": True}
    body = ResponsesRequest.model_validate({"input": "", "tools": [patch, find, {"type": "web_search"}, TOOLS[-1]]})
    first, second, third, fourth = body.offered_tools() or ()
    assert first["function"]["description"] == "Edits.\n\nThe input follows this grammar:\nstart: x"
    assert first["function"]["parameters"]["required"] == ["input"]
    assert second == {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
    assert [tool["function"]["name"] for tool in (third, fourth)] == ["files.find", "files.patch"]
