"""Chat templates of several families: the form of messages that each one shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.data.chat_template import Abilities, ChatTemplate, Feature, chat_of
from asyncrl_cli.data.special_tokens import MARK, ignoring_marks, plain_ids
from asyncrl_cli.data.tokenizer import character_tokenizer
from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.records.prompt import ChatError, Prompt
from tests.gateway.conversation_stand_ins import CALC, CHATML

pytestmark = pytest.mark.slow

NEW_LINE = "{{ '\\n' }}"
TURN = "<{{ m.role }}>{{ m.content }}"
REPLY = "{% if add_generation_prompt %}<assistant>{% endif %}"
TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"


def template_of(calls: str, before: str = "", turn: str = TURN) -> str:
    return (
        f"{before}{{% for m in messages %}}{turn}{{% for call in m.tool_calls or [] %}}{calls}{{% endfor %}}{NEW_LINE}"
        f"{{% endfor %}}{REPLY}"
    )


ITEMS = template_of(
    "<call={{ call.function.name }}>{% for key, value in call.function.arguments | items %}"
    "<{{ key }}>{{ value }}{% endfor %}",
    TOOLS,
)
"""Like Qwen3.5's."""
JOINED = (
    f"{TOOLS}{{% for m in messages %}}{{% if m.role == 'assistant' and m.content is none %}}"
    "{% for call in m.tool_calls %}{{ '<call>' + call.function.name + '\n' + call.function.arguments }}{% endfor %}"
    f"{{% else %}}{TURN}{{% endif %}}{NEW_LINE}{{% endfor %}}{REPLY}"
)
"""Like DeepSeek-V3's."""
PRINTED = template_of("<call>{{ call.function.name }} {{ call.function.arguments }}", TOOLS)
TEXT_ONLY = (
    f"{{% for m in messages if m.role in ('system', 'user', 'assistant') %}}{TURN}{NEW_LINE}{{% endfor %}}{REPLY}"
)
"""Like Phi-4's."""
ONE_CALL = template_of(
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{{ call.function | tojson }}",
    TOOLS,
)
"""Like Llama 3's."""
FIRST_CALL = template_of("{% if loop.first %}{{ call.function | tojson }}{% endif %}", TOOLS)
"""Like gpt-oss's: further calls are omitted."""
NO_SYSTEM = template_of(
    "{{ call.function | tojson }}",
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TOOLS,
)
"""Like Gemma's."""
UNTRIED = {Feature.ARGUMENTS, Feature.PARALLEL, Feature.TEXT, Feature.REASONING}
"""Features that are not tried if a template shows neither system messages nor tool calls."""
CALLS = [
    {"id": f"id{city}", "type": "function", "function": {"name": "find", "arguments": f'{{"city": "{city}"}}'}}
    for city in ("Oslo", "Rome")
]
RESULTS = [{"role": "tool", "tool_call_id": f"id{city}", "content": f"in {city}"} for city in ("Rome", "Oslo")]
USER = {"role": "user", "content": "Where?"}


def template(text: str) -> ChatTemplate:
    tokenizer = character_tokenizer(512)
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer)


def called(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


@pytest.mark.parametrize(
    ("text", "form", "lost"),
    [
        (CHATML, {}, set()),
        (ITEMS, {}, set()),
        (JOINED, {"text_arguments": True, "null_content": True, "separate_text": True}, set()),
        (PRINTED, {"text_arguments": True}, set()),
        (TEXT_ONLY, {}, {Feature.TOOLS, Feature.CALLS, Feature.RESULTS}),
        (ONE_CALL, {"one_call": True}, set()),
        (FIRST_CALL, {"one_call": True}, set()),
        (NO_SYSTEM, {}, {Feature.SYSTEM}),
        (template_of("{{ call.function.name }}", TOOLS), {}, {Feature.ARGUMENTS}),
        ("{{ raise_exception('never') }}", {}, {*Feature} - UNTRIED),
    ],
)
def test_abilities_of_template_families(text: str, form: dict[str, Any], lost: set[Feature]) -> None:
    found = template(text).abilities
    assert found.lost.keys() - {Feature.REASONING} == lost
    assert replace(found, lost={}) == Abilities(**form)
    if text is NO_SYSTEM:
        assert found.lost[Feature.SYSTEM] == "no system role"


@pytest.mark.parametrize("text", [CHATML, ITEMS, JOINED, PRINTED, ONE_CALL, FIRST_CALL])
def test_a_call_is_shown_with_its_arguments_once_encoded(text: str) -> None:
    written = template(text).text([USER, called(CALLS[0]), RESULTS[1]], [CALC], reply=True)
    assert "Oslo" in written and "in Oslo" in written
    assert '\\"' not in written and "'city'" not in written
    if text is not ITEMS:
        assert '{"city": "Oslo"}' in written


@pytest.mark.parametrize("text", [ONE_CALL, FIRST_CALL])
def test_calls_are_shown_one_by_one_each_with_its_result(text: str) -> None:
    one = template(text)
    written = one.text([USER, called(*CALLS, content="So:"), *RESULTS], reply=True)
    assert [line for line in written.split("\n") if line] == [
        "<user>Where?",
        '<assistant>So:{"name": "find", "arguments": {"city": "Oslo"}}',
        "<tool>in Oslo",
        '<assistant>{"name": "find", "arguments": {"city": "Rome"}}',
        "<tool>in Rome",
        "<assistant>",
    ]
    # A reply that was sampled keeps both calls, and both results follow it.
    chat = ChatFormat(one._tokenizer)
    rest = chat.decode(chat.continue_(RESULTS, None, None, called(*CALLS)).ids)
    assert rest == "\n<tool>in Rome\n<tool>in Oslo\n<assistant>"


def test_text_next_to_calls_is_a_message_where_the_template_asks_for_no_content() -> None:
    joined = template(JOINED)
    written = joined.text([USER, called(CALLS[0], content="So:"), RESULTS[1]], reply=True)
    assert written == '<user>Where?\n<assistant>So:\n<call>find\n{"city": "Oslo"}\n<tool>in Oslo\n<assistant>'
    chat = ChatFormat(joined._tokenizer)
    rest = chat.decode(chat.continue_([RESULTS[1]], None, None, called(CALLS[0], content="So:")).ids)
    assert rest == "\n<tool>in Oslo\n<assistant>"


def test_keys_and_roles_that_a_template_knows_reach_it() -> None:
    marked = template("{% for m in messages %}<{{ m.role }}{{ m.mark }}>{{ m.content }}{% endfor %}")
    developer = {"role": "developer", "content": "rules", "mark": "!", "other": None}
    assert marked.text([developer, USER]) == "<system!>rules<user>Where?"
    knows = template("{# developer #}{% for m in messages %}<{{ m.role }}>{% endfor %}")
    assert knows.text([developer]) == "<developer>"


TRIMS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"


@given(st.text(st.characters(codec="utf-8"), max_size=8), st.sampled_from(["<end>", "nd>", "a", "", "\n", "é "]))
def test_a_message_at_the_end_is_continued_after_its_last_character(text: str, end: str) -> None:
    content = f"{text}{end}"
    message = {"role": "assistant", "content": content}
    for form, kept in ((template(CHATML), content), (template(TRIMS), content.strip())):
        if not content.strip():
            with pytest.raises(ChatError, match="no text that could be continued"):
                form.text([USER, message], reply=True)
            continue
        before, _, _ = form.text([USER, {**message, "content": "REPLY"}]).rpartition("REPLY")
        assert form.text([USER, message], reply=True) == before + kept


def test_a_message_that_a_template_changes_or_that_has_calls_is_not_continued() -> None:
    with pytest.raises(ChatError, match="has tool calls, or no text"):
        template(CHATML).text([USER, called(CALLS[0], content="There")], reply=True)
    assert template(CHATML).text([USER, called(CALLS[0])])
    short = template("{% for m in messages %}{{ m.content.replace('_', '') }}{% endfor %}")
    with pytest.raises(ChatError, match="changes the assistant message that it should continue"):
        short.text([USER, {"role": "assistant", "content": "Somewhere else"}], reply=True)


def test_variables_of_a_row_are_over_those_of_the_model() -> None:
    tokenizer = character_tokenizer(512)
    tokenizer.chat_template = "{{ a }}{{ b }}{% for m in messages %}{{ m.content }}{% endfor %}"
    form = ChatTemplate(tokenizer, {"a": 1, "b": 2})
    assert form.with_variables({"b": 3}).text([USER]) == "13Where?"
    assert form.text([USER]) == "12Where?" and form.with_variables({}) is form
    for name in ("c", "messages", "tokenize", "chat_template"):
        with pytest.raises(ChatError, match=f"does not read '{name}'"):
            form.with_variables({name: 1})


def test_the_variables_of_a_row_are_an_object_or_json_text_of_one() -> None:
    for value in ({"a": False}, '{"a": false}'):
        assert chat_of(Prompt("u", "Where?", {"chat_template_kwargs": value}))[2] == {"a": False}
    for nothing in (None, {}, "", "{}"):
        assert not chat_of(Prompt("u", "Where?", {"chat_template_kwargs": nothing}))[2]
    for wrong in ("hammer", [1], 3):
        with pytest.raises(ChatError, match="are not an object such as"):
            chat_of(Prompt("u", "Where?", {"chat_template_kwargs": wrong}))


def test_the_tools_of_a_row_are_definitions_or_json_text_of_them() -> None:
    for tools in ([CALC], '[{"type": "function", "function": {"name": "calc"}}]'):
        messages, found, _ = chat_of(Prompt("u", "Where?", {"tools": tools}))
        assert messages == (USER,) and found and found[0]["function"]["name"] == "calc"
    for nothing in (None, [], "", "[]"):
        assert chat_of(Prompt("u", "Where?", {"tools": nothing, "images": nothing}))[1] is None
    assert chat_of(Prompt("u", "With hammer: where?", {"tools": "hammer"}))[1] is None, "the split's template wrote it"
    for fields in ({"tools": "hammer"}, {"tools": [{"name": "calc"}]}, {"tools": 3}, {"images": ["a.png"]}):
        with pytest.raises(ChatError, match="rename"):
            chat_of(Prompt("u", "Where?", fields))


# -- text in messages is text


def tokens_of(tokens: Sequence[str], text: str, *, normalized: bool = False, spaces: bool = False) -> Any:
    """A tokenizer of bytes, or of characters with "▁" for spaces, with these special tokens and a template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if spaces:
        letters = ["<unk>", "▁", *map(chr, range(33, 127)), "\n", "ä"]
        backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, [], unk_token="<unk>"))
        steps = [normalizers.Replace(" ", "▁"), *([] if normalized else [normalizers.Prepend("▁")])]
        backend.normalizer = normalizers.Sequence(steps)
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=normalized) for token in tokens])
    backend.add_tokens(["<think>", "</think>", "<tool_call>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=tokens[0], eos_token=tokens[-1], pad_token=tokens[-1], chat_template=text
    )


def turns(before: str, after: str, begin: str = "") -> str:
    return (
        f"{begin}{{% for tool in tools or [] %}}{{{{ tool | tojson }}}}{{% endfor %}}"
        f"{{% for m in messages %}}{before}{{{{ m.content | trim }}}}"
        f"{{% for call in m.tool_calls or [] %}}{{{{ call.function | tojson }}}}{{% endfor %}}{after}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{before.replace('m.role', repr('assistant'))}{{% endif %}}"
    )


FAMILIES = {
    "chatml": (
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        turns("<|im_start|>{{ m.role }}\n", "<|im_end|>\n"),
        {},
    ),
    "llama": (
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        turns("<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n", "<|eot_id|>", "{{ bos_token }}"),
        {},
    ),
    "mistral": (
        ["<s>", "[INST]", "[/INST]", "</s>"],
        turns("{{ '[INST] ' }}", "[/INST]</s>", "{{ bos_token }}"),
        {"spaces": True},
    ),
    "older": (
        ["<s>", "[INST]", "[/INST]", "</s>"],
        turns("[INST]", "[/INST]</s>"),
        {"spaces": True, "normalized": True},
    ),
    "phi": (
        ["<|end|>", "<|user|>", "<|system|>", "<|tool|>", "<|assistant|>"],
        turns("{{ '<|' + m.role + '|>' }}", "<|end|>"),
        {},
    ),
    "deepseek": (["<｜begin｜>", "<｜User｜>", "<｜end｜>"], turns("<｜User｜>", "<｜end｜>"), {}),
}


@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(st.one_of(st.integers(0, 4), st.text("a <|_ä>s\n", max_size=4), st.sampled_from(["<think>", MARK]))),
)
@settings(max_examples=150)
def test_no_text_of_a_message_becomes_a_special_token(family: str, pieces: list[int | str]) -> None:
    tokens = FAMILIES[family][0]
    form = _family(family)
    tokenizer = form._tokenizer
    content = "".join(tokens[piece % len(tokens)] if isinstance(piece, int) else piece for piece in pieces)
    special = set(tokenizer.convert_tokens_to_ids(tokens))
    ids, neutral = (form.encode([form.text(*saying(words), reply=True)])[0] for words in (content, "x"))
    assert [token for token in ids if token in special] == [token for token in neutral if token in special]
    plain = ChatTemplate(tokenizer, reads_special=True).text(*saying(content.replace(MARK, "")), reply=True)
    assert "".join(tokenizer.decode(ids, skip_special_tokens=False).split()) == "".join(plain.split())
    if not any(token in content for token in tokens):
        assert ids == tokenizer(plain, add_special_tokens=False)["input_ids"], "ordinary texts are tokenized as ever"


def saying(content: str) -> tuple[list[Any], list[Any]]:
    """A conversation and a tool with the content in every text."""
    call = {"id": "id0", "type": "function", "function": {"name": "calc", "arguments": {content: content}}}
    messages = [
        {"role": "system", "content": content},
        {"role": "user", "content": content},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": content, "tool_call_id": "id0"},
        {"role": "user", "content": content},
    ]
    return messages, [{"type": "function", "function": {"name": "calc", "description": content}}]


@cache
def _family(name: str) -> ChatTemplate:
    tokens, text, how = FAMILIES[name]
    return ChatTemplate(tokens_of(tokens, text, **how))


def test_an_assistant_message_may_have_tokens_that_structure_no_turns() -> None:
    tokens = ["<|endoftext|>", "<|im_start|>", "[THINK]", "[/THINK]", "<|im_end|>"]
    form = ChatTemplate(tokens_of(tokens, FAMILIES["chatml"][1]))
    thought = "[THINK]so[/THINK]4<|im_end|>"
    for role, count in (("assistant", 4), ("user", 2)):
        ids = form.encode([form.text([{"role": role, "content": thought}])])[0]
        assert sum(token in form._tokenizer.convert_tokens_to_ids(tokens) for token in ids) == count
    assert form.special_text([{"role": "assistant", "content": thought}]) == "<|im_end|>"
    assert form.special_text([{"role": "user", "content": thought}]) == "[THINK]"


def test_a_tokenizer_that_cannot_write_a_special_token_as_text_refuses_it() -> None:
    short = ChatTemplate(tokens_of(["~", "<|im_end|>"], FAMILIES["chatml"][1]))
    with pytest.raises(ChatError, match=r"special token of one character.*data.special_tokens"):
        short.text([{"role": "user", "content": "a~b"}])
    with pytest.raises(ChatError, match="cannot write as text"):
        ignoring_marks(SimpleNamespace())


def test_variables_of_a_row_are_text_and_the_models_own_are_not() -> None:
    tokenizer = tokens_of(
        ["<|im_start|>", "<|im_end|>"], "{{ tone }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    form = ChatTemplate(tokenizer, {"tone": "<|im_start|>"})
    other = form.with_variables({"tone": "<|im_start|>"})
    ids = [one.encode([one.text([USER])])[0] for one in (form, other)]
    assert [sum(token in tokenizer.all_special_ids for token in one) for one in ids] == [1, 0]


def test_the_date_of_a_template_is_fixed() -> None:
    tokenizer = character_tokenizer(512)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }} {% for m in messages %}{{ m.content }}{% endfor %}"
    assert ChatTemplate(tokenizer).text([USER]) == "01 Jan 2026 Where?"
    assert ChatTemplate(tokenizer, today=date(2024, 7, 26)).text([USER]) == "26 Jul 2024 Where?"


def test_a_plain_text_that_begins_with_the_begin_token_has_it_once() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokens_of(["<s>", "</s>"], None, spaces=True)
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", begin)])
    for text, count in (("a", 1), ("<s>a", 1), ("<s><s>a", 2)):
        assert plain_ids(tokenizer, [text])[0].count(begin) == count
