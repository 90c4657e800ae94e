"""Reasoning: separated as in vLLM, its tokens kept from turn to turn, and sent back or omitted by clients."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from asyncrl_cli.data.chat_template import ChatTemplate
from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.gateway.parsers import FORMS, ParserError, check_reasoning_parser, vllm_reasoning_parser
from asyncrl_cli.gateway.reply_stream import ReplyPart, divided
from asyncrl_cli.gateway.session import CallOptions
from asyncrl_cli.records.generation import RolloutRequest, Sampling, Segment
from asyncrl_cli.rollout.continuation import finished
from asyncrl_cli.rollout.response_text import decoder
from tests.gateway.conversation_stand_ins import CALC, ask_chat, ask_text, byte_tokenizer, end_of, rollout_of
from tests.gateway.gateway_stand_ins import Engine, new_session

CALL = '<tool_call>{"name": "calc", "arguments": {"e": "1+1"}}</tool_call>'
QUESTION: dict[str, Any] = {"role": "user", "content": "1+1?"}
TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "<thi", "</", "nk>", ">", "\n", " "])
    | st.text("ab<é>", max_size=3),
    max_size=10,
).map("".join)


def thinking_tokenizer(template: str | None = None, special: bool = False) -> Any:
    """The byte tokenizer with a token for each mark."""
    tokenizer = copy.deepcopy(byte_tokenizer())
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<seed:think>", "</seed:think>"]
    tokenizer.add_tokens([*marks, "<seed:tool_call>", "</seed:tool_call>"], special_tokens=special)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


@pytest.mark.slow  # vLLM's import
@pytest.mark.parametrize("name", FORMS)
@given(TEXTS)
def test_forms_are_read_as_vllm_reads_them(name: str, text: str) -> None:
    form = FORMS[name]
    text = text.replace("<think>", form.opening).replace("</think>", form.closing)
    text = text.replace("<tool_call>", *form.call[:1] or ["<tool_call>"])
    if form.once:  # vLLM loses all text before an opening mark
        assume(text.rfind(form.opening) <= 0)
    theirs = vllm_reasoning_parser(name, thinking_tokenizer(), {})
    assert divided(text, form) == theirs(text)


def test_a_form_loses_no_text_but_its_marks() -> None:
    assert divided("a<think>why</think>so</think>", FORMS["deepseek_r1"]) == ("awhy", "so</think>")


@pytest.mark.parametrize("special", [False, True])
def test_a_reply_is_reasoning_content_and_calls(special: bool) -> None:
    chat = ChatFormat(thinking_tokenizer(special=special), None, "qwen3")

    def parsed(text: str, **asked: Any) -> dict[str, Any]:
        return dict(chat.parse([1], [*chat.encode(text), end_of(chat)], **asked))

    expected: dict[str, Any] = {"role": "assistant", "reasoning_content": "why", "content": "so"}
    assert parsed("<think>why</think>so") == expected
    assert list(parsed("<think>why</think>so")) == list(expected)
    assert parsed("<think></think>so") == {"role": "assistant", "content": "so"}
    assert parsed("<think>why") == expected | {"content": ""}
    assert parsed("<think>why</think>so STOP it", stop=["STOP"]) == expected | {"content": "so "}
    assert parsed("<think>why STOP</think>so", stop=["STOP"]) == expected | {"reasoning_content": "why ", "content": ""}
    called = parsed(f"<think>why {CALL}</think>so{CALL}", tools=[CALC])
    assert called["reasoning_content"] == "why "
    assert len(called["tool_calls"]) == 2, "a call ends the reasoning of this model"
    called = parsed(f"<think>why</think>{CALL}", tools=[CALC])
    assert called["content"] is None and len(called["tool_calls"]) == 1
    assert parsed(f"<think>why</think>{CALL}")["content"] == CALL
    assert parsed("<think>why</think><tool_call>no", tools=[CALC])["content"] == "<tool_call>no"


def test_where_the_prompt_closes_the_reasoning_a_reply_is_content() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}a:<think>{% if off %}\n</think>{% endif %}{% endif %}"
    )
    loaded = thinking_tokenizer(template)
    on = ChatFormat(loaded, None, "qwen3")
    assert on.parse([1], on.encode("why</think>so"))["reasoning_content"] == "why"
    off = ChatFormat(loaded, None, "qwen3", template=ChatTemplate(loaded, {"off": True}))
    assert off.parse([1], off.encode("so")) == {"role": "assistant", "content": "so"}


def test_parsers_are_checked_by_name_and_against_the_tokenizer() -> None:
    for name in (None, "qwen3", "deepseek_r1", "granite"):
        check_reasoning_parser(name)
    with pytest.raises(ParserError, match="did you mean `qwen3`"):
        check_reasoning_parser("qwen33")


@pytest.mark.slow  # vLLM's import
def test_other_formats_are_vllms() -> None:
    chat = ChatFormat(byte_tokenizer(), None, "granite")
    text = "Here is my thought process: why Here is my response: so"
    message = chat.parse([1], [*chat.encode(text), end_of(chat)])
    assert (message["reasoning_content"].strip(), message["content"].strip()) == ("why", "so")
    with pytest.raises(ParserError, match="does not fit this model's tokenizer"):
        ChatFormat(byte_tokenizer(), None, "holo2")
    with pytest.raises(ParserError, match="did you mean"):
        ChatFormat(byte_tokenizer(), None, "granit")


# -- in conversations

KEEPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that keeps the reasoning of every turn."""
DROPS = KEEPS.replace("m.reasoning_content", "false")
THOUGHT = "<think>one  and\none</think>2"


def says(template: str, *texts: str) -> Engine:
    """A model that replies with one text after another."""
    replies = iter(texts)
    chat = ChatFormat(thinking_tokenizer(template), None, "qwen3")
    return Engine(lambda prompt, request: next(replies), chat=chat)


@pytest.mark.parametrize("template", [KEEPS, DROPS])
@pytest.mark.parametrize("sent_back", ["reasoning_content", "reasoning", None])
async def test_a_conversation_continues_in_the_tokens_of_the_reasoning(template: str, sent_back: str | None) -> None:
    engine = says(template, THOUGHT, f"<think>again</think>{CALL}", "so")
    session, messages, replies = new_session("3-1", engine, fixed_sampling=True), [QUESTION], []
    for after in (QUESTION, {"role": "tool", "content": "2"}, QUESTION):
        (reply,) = await ask_chat(session, messages, [CALC], CallOptions())
        sent = dict(reply.message)
        reasoning = sent.pop("reasoning_content")
        messages = [*messages, sent | ({sent_back: reasoning} if sent_back else {}), after]
        replies.append(reply)
    rollout = rollout_of(session)
    assert not rollout.branches
    first, second, third = replies
    assert first.message["reasoning_content"] == "one  and\none" and first.message["content"] == "2"
    for before, after in ((first, second), (second, third)):
        known = (*before.prompt_ids, *before.token_ids)
        assert after.prompt_ids[: len(known)] == known
    assert second.finish_reason == "tool_calls"
    assert third.message == {"role": "assistant", "reasoning_content": "so", "content": ""}


@pytest.mark.parametrize(("template", "rendered"), [(KEEPS, "<think>two</think>2"), (DROPS, "\n2")])
async def test_reasoning_that_a_client_changes_begins_a_branch(template: str, rendered: str) -> None:
    engine = says(template, THOUGHT, "so", "so")
    session = new_session("3-1", engine, fixed_sampling=True)
    (reply,) = await ask_chat(session, [QUESTION], None, CallOptions())
    changed = dict(reply.message) | {"reasoning_content": "two"}
    (other,) = await ask_chat(session, [QUESTION, changed, QUESTION], None, CallOptions())
    assert rendered in engine.chat.decode(other.prompt_ids, special=True), "the template decides whether it is kept"
    rollout = rollout_of(session)
    assert len(rollout.branches) == 1
    (same,) = await ask_chat(session, [QUESTION, reply.message, QUESTION], None, CallOptions())
    assert len(rollout_of(session).branches) == 1, "the first sequence continues"
    known = (*reply.prompt_ids, *reply.token_ids)
    assert same.prompt_ids[: len(known)] == known


async def test_a_text_is_not_divided() -> None:
    engine = says(KEEPS, THOUGHT)
    parts: list[ReplyPart] = []
    (reply,) = await ask_text(
        new_session("3-1", engine, fixed_sampling=True), "a", CallOptions(), lambda _, part: parts.append(part)
    )
    assert reply.text == "".join(part.text for part in parts) == THOUGHT
    assert {part.kind for part in parts} == {"content"}


@pytest.mark.parametrize("shown", [False, True])
def test_equal_tokens_have_equal_text_for_rewards_and_for_the_gateway(shown: bool) -> None:
    tokenizer = thinking_tokenizer(special=True)
    chat = ChatFormat(tokenizer, shows_special=shown)
    decode = decoder(tokenizer, chat.end_tokens, shown)
    ids = [*chat.encode("<think>why</think>so#no"), end_of(chat)]
    text = "<think>why</think>so" if shown else "whyso"
    (asked,) = [RolloutRequest("r", (1,), Sampling(1.0, 99, stop=("#",)))]
    segment = Segment("r", 0, 0, np.asarray(ids, np.int32), np.zeros(len(ids), np.float32))
    assert finished(asked, [segment], "stop", decode).text == text
    assert chat.parse([1], ids, stop=("#",))["content"] == text
    stream = chat.stream(None, ("#",))
    parts = [*stream.feed(ids), *stream.finish({"role": "assistant", "content": text})]
    assert "".join(part.text for part in parts) == text
    assert decode(ids) == chat.decode(ids)
