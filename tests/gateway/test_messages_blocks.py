"""Content blocks and messages: a reply that a client sends back is recognized, however it is divided into blocks."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from asyncrl_cli.gateway.errors import ApiError
from asyncrl_cli.gateway.messages_reply import reply_blocks
from asyncrl_cli.gateway.messages_request import CountRequest, MessagesRequest
from asyncrl_cli.gateway.wire import canonical_json
from asyncrl_cli.records.prompt import Message, normalized

pytestmark = pytest.mark.slow

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def replies(draw: st.DrawFn) -> Message:
    """Replies in the format of sessions."""
    reply: dict[str, Any] = {"role": "assistant", "content": draw(TEXTS)}
    if reasoning := draw(TEXTS):
        reply["reasoning_content"] = reasoning
    calls = draw(st.lists(st.tuples(TEXTS.filter(bool), st.dictionaries(TEXTS, VALUES, max_size=3)), max_size=3))
    if calls:
        # Python parses 1e999, which a model may write, as Infinity.
        written = [(name, json.dumps(arguments).replace("Infinity", "1e999")) for name, arguments in calls]
        reply["tool_calls"] = [
            {"id": f"{index:09}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(written)
        ]
        reply["content"] = reply["content"] or None
    return reply


def javascript(value: Any) -> Any:
    """A JSON value after a program in JavaScript has parsed and serialized it."""
    if isinstance(value, dict):
        return {name: javascript(one) for name, one in value.items()}
    if isinstance(value, list):
        return [javascript(one) for one in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        double = float(value)
    except OverflowError:
        return None
    return None if not math.isfinite(double) else int(double) if double.is_integer() else double


def conversation(*messages: Any, **more: Any) -> list[Message]:
    return CountRequest.model_validate({"messages": list(messages)} | more).chat_messages()


def spoken(message: Message) -> tuple[str, str]:
    """The part of a message that sessions compare."""
    return canonical_json(normalized(message)), message.get("reasoning_content", "")


@given(replies(), st.data())
def test_a_reply_that_is_sent_back_is_the_same(reply: Message, data: st.DataObject) -> None:
    blocks: list[Any] = [*reply_blocks(reply)]
    assert blocks, "programs read the first block"
    blocks = json.loads(json.dumps(blocks, allow_nan=False))
    if data.draw(st.booleans(), "in JavaScript"):
        blocks = javascript(blocks)
    if data.draw(st.booleans(), "without blocks of white space"):
        blocks = [block for block in blocks if block["type"] != "text" or block["text"].strip()] or blocks
    for block in blocks:
        if data.draw(st.booleans(), "marked for a cache"):
            block["cache_control"] = {"type": "ephemeral"}
    cuts = sorted(data.draw(st.lists(st.integers(0, len(blocks)), max_size=2), "cuts"))
    turns = [blocks[start:end] for start, end in zip([0, *cuts], [*cuts, len(blocks)], strict=True)]
    user = {"role": "user", "content": "?"}
    found = conversation(user, *({"role": "assistant", "content": turn} for turn in turns), user)
    assert [message["role"] for message in found] == ["user", "assistant", "user"]
    assert spoken(found[1]) == spoken(reply)


def test_results_of_tools_come_before_the_users_text() -> None:
    blocks = [
        {"type": "text", "text": "and "},
        {"type": "tool_result", "tool_use_id": "a", "content": "1"},
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "2"}], "is_error": True},
        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "document", "source": {}}]},
        {"type": "text", "text": "now?"},
    ]
    results: list[Message] = [
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "Error: 2"},
        {"role": "tool", "tool_call_id": "c", "content": "[document]"},
    ]
    together = [*results, {"role": "user", "content": "and now?"}]
    assert conversation({"role": "user", "content": blocks}) == together
    assert conversation({"role": "user", "content": blocks[1:4]}) == results
    apart = [{"role": "user", "content": blocks[at : at + 1]} for at in range(1, 4)]
    assert conversation(*apart, {"role": "user", "content": "now?"}) == [*results, {"role": "user", "content": "now?"}]


def test_system_prompts() -> None:
    user = {"role": "user", "content": "x"}
    header = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cch=fa690;"
    blocks = [{"type": "text", "text": header}, {"type": "text", "text": "Be brief."}]
    for system in ("Be brief.", f"{header}\nBe brief.", blocks):
        assert conversation(user, system=system)[0] == {"role": "system", "content": "Be brief."}
    assert conversation(user, system=[]) == conversation(user, system="") == conversation(user) == [user]
    within = conversation({"role": "system", "content": "a"}, user, {"role": "system", "content": "b"}, system="c")
    assert within == [{"role": "system", "content": "c\n\na"}, {"role": "user", "content": "x\n\nb"}]


def test_reasoning_of_another_server_is_not_shown() -> None:
    hidden = [{"type": "redacted_thinking", "data": "eA=="}, {"type": "text", "text": "x"}]
    assert conversation({"role": "assistant", "content": hidden}) == [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize(
    ("role", "block", "reason"),
    [
        ("user", {"type": "image", "source": {"type": "url", "url": "x"}}, "nothing is downloaded"),
        ("user", {"type": "document", "source": {}}, "Input tag 'document'"),
        ("user", {"type": "tool_use", "id": "a", "name": "f", "input": {}}, "Input tag 'tool_use'"),
        ("assistant", {"type": "tool_result", "tool_use_id": "a"}, "Input tag 'tool_result'"),
        ("assistant", {"type": "server_tool_use", "id": "a", "name": "f", "input": {}}, "Input tag 'server_tool_use'"),
        ("system", {"type": "image", "source": {}}, "Input should be 'text'"),
    ],
)
def test_blocks_that_a_policy_cannot_see_are_refused_with_the_reason(role: str, block: Any, reason: str) -> None:
    with pytest.raises(ValidationError) as raised:
        CountRequest.model_validate({"messages": [{"role": role, "content": [block]}]})
    assert reason in str(raised.value)


def request(**more: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]} | more)


def test_tools_are_functions_to_templates() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tool = {"name": "f", "description": "Adds.", "input_schema": schema, "cache_control": {"type": "ephemeral"}}
    function = {"name": "f", "description": "Adds.", "parameters": schema}
    searches = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    for choice in (None, {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}):
        asked = request(tools=[tool | {"type": "custom"}, searches], tool_choice=choice)
        assert asked.offered_tools() == [{"type": "function", "function": function}]
    assert request(tools=[tool], tool_choice={"type": "none"}).offered_tools() is None
    assert request(tools=[searches]).offered_tools() is None
    for wrong in ({"name": "f"}, {"input_schema": schema}):
        with pytest.raises(ValidationError, match="name and input_schema"):
            request(tools=[wrong])
    with pytest.raises(ValidationError, match="not among the tools"):
        request(tools=[tool], tool_choice={"type": "tool", "name": "g"})


def test_tools_that_sessions_of_a_run_omit_are_refused_elsewhere() -> None:
    searching = request(tools=[{"type": "web_search_20250305", "name": "web_search"}])
    with pytest.raises(ApiError, match="not supported") as refused:
        searching.refuse_unsupported(fixed_sampling=False)
    assert refused.value.code == "unsupported_parameter"
    searching.refuse_unsupported(fixed_sampling=True)


def test_only_edits_that_remove_no_history_are_accepted() -> None:
    request(context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})
    with pytest.raises(ValidationError, match="edits of type clear_tool_uses_20250919 are not supported"):
        request(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]})
