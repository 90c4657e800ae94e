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
from asyncrl_cli.gateway.parsers import HERMES, LAYOUTS
from asyncrl_cli.gateway.reply_stream import FIELDS, ReplyPart, TextKind
from tests.gateway.conversation_stand_ins import CALC, byte_tokenizer

pytestmark = pytest.mark.slow

ARGUMENTS = '{"e": "1+1"}'
JSON_CALL = '{"name": "calc", "arguments": {"e": "1+1"}}'
QWEN3 = "<tool_call>\n<function=calc>\n<parameter=e>\n1+1\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>calc\n<arg_key>e</arg_key>\n<arg_value>1+1</arg_value>\n</tool_call>"
DSML = "<｜DSML｜"
CALLS = {
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calc\n```json\n"
    + ARGUMENTS
    + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calc<｜tool▁sep｜>"
    + ARGUMENTS
    + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": f'{DSML}function_calls>\n{DSML}invoke name="calc">\n{DSML}parameter name="e" string="true">1+1'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "glm45": GLM,
    "glm47": GLM,
    "granite": f"<|tool_call|>[{JSON_CALL}]",
    "granite-20b-fc": f"<function_call>{JSON_CALL}",
    "hermes": f"<tool_call>{JSON_CALL}</tool_call>",
    "jamba": f"<tool_calls>[{JSON_CALL}]</tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.calc:0<|tool_call_argument_begin|>"
    + ARGUMENTS
    + "<|tool_call_end|><|tool_calls_section_end|>",
    "llama3_json": JSON_CALL.replace("arguments", "parameters"),
    "llama4_json": "<|python_tag|>" + JSON_CALL,
    "longcat": f"<longcat_tool_call>{JSON_CALL}</longcat_tool_call>",
    "mimo": QWEN3.replace("\n", ""),
    "minimax_m2": '<minimax:tool_call>\n<invoke name="calc">\n<parameter name="e">1+1</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "mistral": f"[TOOL_CALLS][{JSON_CALL}]",
    "phi4_mini_json": f"functools[{JSON_CALL}]",
    "qwen3_coder": QWEN3,
    "qwen3_json": f"<tool_call>{JSON_CALL}</tool_call>",
    "qwen3_xml": QWEN3,
    "seed_oss": QWEN3.replace("tool_call", "seed:tool_call"),
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="calc">'
    '<steptml:parameter name="e">1+1</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
}
"""A call of calc in each format."""
DROPS_CONTENT = {"llama3_json", "llama4_json", "phi4_mini_json"}
"""vLLM's parsers of these formats drop the text before a call."""
SPECIAL = (
    *("<think>", "</think>", "<seed:think>", "</seed:think>", "<tool_call>", "</tool_call>", "<|tool_call|>"),
    *("<seed:tool_call>", "</seed:tool_call>", "<tool_calls>", "</tool_calls>", "[TOOL_CALLS]", "<|python_tag|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<minimax:tool_call>", "</minimax:tool_call>", "<｜tool_calls_begin｜>"),
    *("<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>", "<|odd|>"),
    *("<longcat_tool_call>", "</longcat_tool_call>", "[THINK]", "[/THINK]", "<｜tool▁sep｜>"),
)


@cache
def chat_format(name: str | None, reasoning: str | None, special: bool) -> ChatFormat:
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.add_tokens(list(SPECIAL), special_tokens=special)
    return ChatFormat(tokenizer, name, reasoning)


def texts(name: str) -> st.SearchStrategy[str]:
    """Replies with calls, pieces of them, marks, and text."""
    call = CALLS[name]
    ends = st.integers(0, len(call))
    marks = [*LAYOUTS.get(name, ()), "<think>", "</think>", "<tool_call>", "<|odd|>", "<|im_start|>"]
    pieces = (
        st.sampled_from([call, call, *marks])
        | ends.map(lambda end: call[:end])
        | ends.map(lambda start: call[start:])
        | st.sampled_from(["so ", " ", "\n\n", "é€😀", "a", "<", "{", "[", "STOP", "ST"])
    )
    return st.lists(pieces, max_size=6).map("".join)


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


@given(texts(HERMES), CUTS, STOPS, st.sampled_from([None, "qwen3", "deepseek_r1"]), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=300)
def test_parts_make_the_message(
    text: str, cuts: list[int], stop: list[str], reasoning: str | None, special: bool, with_tools: bool
) -> None:
    chat = chat_format(None, reasoning, special)
    streamed(chat, chat.encode(text), cuts, stop, [CALC] if with_tools else None)


@given(st.lists(st.integers(0, 300), max_size=20), CUTS, STOPS, st.booleans(), st.booleans())
@settings(deadline=None, max_examples=200)
def test_parts_of_any_tokens_make_the_message(
    ids: list[int], cuts: list[int], stop: list[str], special: bool, with_tools: bool
) -> None:
    chat = chat_format(None, "qwen3", special)
    ids = [token % chat.vocabulary for token in ids if token % chat.vocabulary not in chat.end_tokens]
    streamed(chat, ids, cuts, stop, [CALC] if with_tools else None)


@pytest.mark.slow  # vLLM's import
@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("special", [False, True])
def test_layouts_match_vllms_parsers(name: str, special: bool) -> None:
    chat = chat_format(name, None, special)
    message, _, early = streamed(chat, chat.encode("so so" + CALLS[name]), range(100), [], [CALC])
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "calc" and json.loads(call["function"]["arguments"]) == {"e": "1+1"}
    assert message["content"].strip() == "so so"
    assert early > 3, "content comes before the end"

    @given(texts(name), CUTS, STOPS, st.sampled_from([None, "qwen3", "deepseek_r1"]))
    @settings(deadline=None, max_examples=60)
    def check(text: str, cuts: list[int], stop: list[str], reasoning: str | None) -> None:
        chat = chat_format(name, reasoning, special)
        message, _, _ = streamed(chat, chat.encode(text), cuts, stop, [CALC])
        # Marks of reasoning divide a text, also inside a call, and their parser of tools does not know them.
        divided = bool(reasoning or stop) or "think>" in text
        if message.get("tool_calls") and not (divided or name in DROPS_CONTENT or "odd" in text):
            theirs = chat._tools(chat.decode(chat.encode(text), special=True), [CALC])
            assert theirs is not None
            assert (message["content"] or "").strip() == theirs.content.strip()

    check()


@pytest.mark.slow  # vLLM's import
def test_a_format_without_a_layout_comes_at_the_end_and_its_reasoning_does_not() -> None:
    chat = chat_format("pythonic", "qwen3", False)
    ids = chat.encode('<think>why</think>[calc(e="1+1")]')
    message, parts, early = streamed(chat, ids, range(100), [], [CALC])
    assert message["tool_calls"] and message["reasoning_content"] == "why"
    assert early == len(parts) == 3
    _, parts, early = streamed(chat, chat.encode("<think>why</think>so so"), range(100), [], [CALC])
    assert (early, parts[-1]) == (3, ReplyPart("content", "so so"))
    granite = chat_format(None, "granite", False)
    text = "Here is my thought process: why Here is my response: so"
    assert streamed(granite, granite.encode(text), range(100), [], None)[2] == 0
