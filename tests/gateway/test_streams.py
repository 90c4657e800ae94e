"""Replies in pieces: for each field, the pieces are a prefix of the message, and in the end the complete message."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.gateway.reply_stream import FIELDS, ReplyPart, TextKind
from tests.gateway.conversation_stand_ins import CALC, byte_tokenizer

pytestmark = pytest.mark.slow

JSON_CALL = '{"name": "calc", "arguments": {"e": "1+1"}}'
CALLS = {
    "hermes": f"<tool_call>{JSON_CALL}</tool_call>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calc<｜tool▁sep｜>"
    '{"e": "1+1"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "mistral": f"[TOOL_CALLS][{JSON_CALL}]",
    "qwen3_coder": "<tool_call>\n<function=calc>\n<parameter=e>\n1+1\n</parameter>\n</function>\n</tool_call>",
}
"""A call of calc in some formats."""
SPECIAL = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<｜tool▁calls▁begin｜>", "<|odd|>"),
    *("<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "[THINK]", "[/THINK]"),
)


@cache
def chat_format(name: str | None, reasoning: str | None, special: bool) -> ChatFormat:
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.add_tokens(list(SPECIAL), special_tokens=special)
    return ChatFormat(tokenizer, name, reasoning)


ENDS = st.integers(0, len(CALLS["hermes"]))
TEXTS = st.lists(
    st.sampled_from([CALLS["hermes"], CALLS["hermes"], "<think>", "</think>", "<tool_call>", "<|odd|>", "<|im_start|>"])
    | ENDS.map(lambda end: CALLS["hermes"][:end])
    | ENDS.map(lambda start: CALLS["hermes"][start:])
    | st.sampled_from(["so ", " ", "\n\n", "é€😀", "a", "<", "{", "[", "STOP", "ST"]),
    max_size=6,
).map("".join)
"""Replies with calls, pieces of them, marks, and text."""
CUTS = st.lists(st.integers(0, 300), max_size=12)
STOPS = st.lists(st.sampled_from(["STOP", "a", "\n\n", "😀", "</", "TOP"]), max_size=2)


def streamed(
    chat: ChatFormat, ids: Sequence[int], cuts: Sequence[int], stop: Sequence[str], tools: Any
) -> tuple[dict[str, Any], list[ReplyPart], int]:
    """The message, the parts, and how many of them came before the end."""
    message = dict(chat.parse([1], ids, tools, stop))
    parts: list[ReplyPart] = []
    stream = chat.stream(tools, stop)
    for start, end in itertools.pairwise([0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]):
        parts += stream.feed(ids[start:end])
        for kind, name in FIELDS.items():
            assert (message.get(name) or "").startswith(joined(parts, kind))
    early = len(parts)
    parts += stream.finish(message)
    for kind, name in FIELDS.items():
        assert joined(parts, kind) == (message.get(name) or "")
    kinds = [part.kind for part in parts]
    assert kinds == sorted(kinds, key=list(FIELDS).index), "reasoning comes before content"
    assert all(part.text for part in parts)
    return message, parts, early


def joined(parts: Sequence[ReplyPart], kind: TextKind) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


@given(TEXTS, CUTS, STOPS, st.sampled_from([None, "qwen3", "deepseek_r1"]), st.booleans(), st.booleans())
@settings(max_examples=300)
def test_parts_make_the_message(
    text: str, cuts: list[int], stop: list[str], reasoning: str | None, special: bool, with_tools: bool
) -> None:
    chat = chat_format(None, reasoning, special)
    streamed(chat, chat.encode(text), cuts, stop, [CALC] if with_tools else None)


@given(st.lists(st.integers(0, 300), max_size=20), CUTS, STOPS, st.booleans(), st.booleans())
@settings(max_examples=200)
def test_parts_of_any_tokens_make_the_message(
    ids: list[int], cuts: list[int], stop: list[str], special: bool, with_tools: bool
) -> None:
    chat = chat_format(None, "qwen3", special)
    ids = [token % chat.vocabulary for token in ids if token % chat.vocabulary not in chat.end_tokens]
    streamed(chat, ids, cuts, stop, [CALC] if with_tools else None)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("special", [False, True])
def test_calls_of_vllms_formats_are_read_and_only_reasoning_is_streamed(name: str, special: bool) -> None:
    chat = chat_format(name, "qwen3", special)
    ids = chat.encode("<think>why</think>so so" + CALLS[name])
    message, parts, early = streamed(chat, ids, range(100), [], [CALC])
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "calc" and json.loads(call["function"]["arguments"]) == {"e": "1+1"}
    assert (message["reasoning_content"], message["content"].strip()) == ("why", "so so")
    assert name == "hermes" or {part.kind for part in parts[:early]} == {"reasoning"}


def test_a_reply_that_vllm_divides_comes_at_the_end() -> None:
    chat = chat_format(None, "granite", False)
    text = "Here is my thought process: why Here is my response: so"
    assert streamed(chat, chat.encode(text), range(100), [], None)[2] == 0
