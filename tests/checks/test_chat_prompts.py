"""How a model's chat template renders prompts, and the messages at the start for templates that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from asyncrl_cli.checks.finding import Result, Warned
from asyncrl_cli.checks.prompts import (
    check_prompts,
    check_reply_end,
    check_template,
    check_template_kwargs,
    check_turns,
    shown_prompt,
)
from asyncrl_cli.core.errors import ConfigError, DataError
from asyncrl_cli.data.chat_template import ChatTemplate
from asyncrl_cli.data.prompt_encoder import PromptEncoder
from asyncrl_cli.data.sources import read_source, row_location
from asyncrl_cli.data.supervised_rows import RowEncoder
from asyncrl_cli.data.tokenizer import character_tokenizer
from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.rollout.response_text import end_tokens
from asyncrl_cli.spec.inputs import SplitSpec, WarmStart

pytestmark = pytest.mark.slow

MODEL = Path(__file__).parents[2] / "templates/saved-model/model"
"""A byte-level BPE tokenizer, and a chat template with tools and reasoning like Qwen3's."""
TEXT = Prompt("text", "2 + 2?")
NO_SYSTEM = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Like Gemma's: without system messages, and with the first token in the template."""
HI = "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}"


def tokenizer(template: str | None = "own") -> Any:
    loaded = AutoTokenizer.from_pretrained(MODEL)
    if template != "own":
        loaded.chat_template = template
    return loaded


def rendered(loaded: Any, prompt: Prompt, **options: Any) -> str:
    ids = PromptEncoder(loaded, 1000, **options).encode(prompt)
    assert ids is not None
    return str(loaded.decode(ids))


def test_a_text_is_a_users_message() -> None:
    loaded = tokenizer()
    assert rendered(loaded, TEXT) == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    chat = Prompt("chat", ({"role": "user", "content": "2 + 2?"},))
    assert PromptEncoder(loaded, 99).encode(TEXT) == PromptEncoder(loaded, 99).encode(chat)
    assert rendered(loaded, chat, apply_chat_template=False) == rendered(loaded, chat)


def test_a_text_is_unchanged_without_a_template_or_if_the_spec_says_so() -> None:
    assert rendered(tokenizer(), TEXT, apply_chat_template=False) == "2 + 2?"
    assert rendered(tokenizer(None), TEXT) == "2 + 2?"
    assert rendered(character_tokenizer(99), TEXT) == "2 + 2?", "the built-in template does not change a text"


def test_the_first_token_is_written_once() -> None:
    loaded = tokenizer(NO_SYSTEM)
    loaded.bos_token = first = "<|endoftext|>"
    number = loaded.convert_tokens_to_ids(first)
    loaded.backend_tokenizer.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, number)])
    assert rendered(loaded, TEXT) == f"{first}[user]2 + 2?<|im_end|>\n[assistant]", "by the template"
    assert rendered(loaded, TEXT, apply_chat_template=False) == f"{first}2 + 2?", "by the tokenizer"
    warm_start = WarmStart(data=SplitSpec(path="rows.jsonl"), response_column="answer")
    encoder = RowEncoder(PromptEncoder(loaded, 99), frozenset({number}), warm_start)
    ids, learned, _ = encoder.encode(Prompt("row", "2 + 2?", {"answer": "4"}))
    assert ids[: learned.index(True)].count(number) == 1, "the same holds for the rows of a warm start"


CALC = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "2 + 2?"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "calc", "arguments": '{"e": "2 + 2"}'}}],
}
RESULT = {"role": "tool", "content": "4"}


def test_tools_calls_and_results_of_a_row_are_as_the_gateway_writes_them() -> None:
    loaded = tokenizer()
    prompt = Prompt("chat", (ASKED, CALLED, RESULT), {"tools": json.dumps([CALC])})
    ids = PromptEncoder(loaded, 999).encode(prompt)
    assert list(ids or ()) == ChatFormat(loaded).render([ASKED, CALLED, RESULT], [CALC]).ids
    text = loaded.decode(ids)
    assert json.dumps(CALC) in text and '"arguments": {"e": "2 + 2"}}' in text and "<tool_response>4" in text
    assert "calc" in rendered(loaded, Prompt("text", "2 + 2?", {"tools": [CALC]}))
    written = Prompt("text", f"Tools: {json.dumps([CALC])}", {"tools": json.dumps([CALC])})
    assert rendered(loaded, written).count("calc") == 1, "the split's template wrote them"


def test_variables_of_a_row_and_a_message_at_the_end_reach_the_prompt(tmp_path: Path) -> None:
    loaded = tokenizer()
    own = {"template": ChatTemplate(loaded, {"enable_thinking": False})}
    quiet = Prompt("row", "2 + 2?", {"chat_template_kwargs": {"enable_thinking": False}})
    assert rendered(loaded, quiet) == rendered(loaded, TEXT, **own)
    assert rendered(loaded, Prompt("row", "2 + 2?", {"chat_template_kwargs": '{"enable_thinking": true}'}), **own) == (
        rendered(loaded, TEXT)
    )
    begun = Prompt("row", (ASKED, {"role": "assistant", "content": "The answer is "}))
    text = rendered(loaded, begun)
    assert text.endswith("The answer is ") and text.count("<|im_start|>assistant") == 1
    ids = PromptEncoder(loaded, 999).encode(begun)
    assert list(ids or ()) == ChatFormat(loaded).render(list(begun.content)).ids
    rows = [{"prompt": "a", "chat_template_kwargs": {"enable_thinking": False}}, {"prompt": "b"}]
    rows.append({"prompt": "c", "chat_template_kwargs": {"other": 1}})
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    read = read_source(SplitSpec(path="rows.parquet"), "train", tmp_path)
    given = [prompt.fields["chat_template_kwargs"] for prompt in read]
    assert given == [{"enable_thinking": False}, None, {"other": 1}], "no row has the variables of others"


TEXT_ALONE = "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "content", "fields", "says"),
    [
        ("own", (ASKED, {"role": "assistant", "content": " "}), {}, "no text that could be continued"),
        ("own", (ASKED, CALLED), {}, "has tool calls"),
        ("own", "2 + 2?", {"chat_template_kwargs": {"enable_thinkin": False}}, "did you mean `enable_thinking`"),
        (None, "2 + 2?", {"chat_template_kwargs": {"x": False}}, "no use for them"),
        ("own", "2 + 2?", {"images": ["a.png"]}, "the row has `images`"),
        ("own", "2 + 2?", {"tools": "calc"}, "`tools` are not definitions"),
        (None, "2 + 2?", {"tools": [CALC]}, "without the chat template"),
        (TEXT_ALONE, "2 + 2?", {"tools": [CALC]}, "the row has tools, which the chat template does not show"),
        (TEXT_ALONE, (ASKED, CALLED, RESULT), {}, "the row has tool calls, which"),
        (TEXT_ALONE, (SYSTEM, ASKED), {}, "the row has system messages, which"),
        ("<{{ messages | length }}>", "2 + 2?", {}, "the row has users' messages, which"),
        (NO_SYSTEM, (SYSTEM, ASKED), {}, "System role not supported"),
    ],
)
def test_rows_that_the_template_cannot_show_are_refused(
    template: str | None, content: Any, fields: dict[str, Any], says: str
) -> None:
    prompts = [Prompt("row", content, fields)]
    encoder = PromptEncoder(tokenizer(template), 999)
    with pytest.raises(DataError, match=says) as refused:
        check_prompts(prompts, encoder, location="data.train", limit_s=9.0, locate="rows.jsonl:{}".format)
    assert refused.value.location == "rows.jsonl:0" and "\n" not in refused.value.message
    starts = "the template takes no system message: remove `system`" if template is NO_SYSTEM else ""
    assert refused.value.hint and refused.value.hint.startswith(starts)
    assert PromptEncoder(tokenizer(template), 999, episodic=True).encode(prompts[0]) == (), "the task's own business"


def shown(template: str | None, episodic: bool = True) -> Result:
    loaded = tokenizer(template)
    return check_template(ChatTemplate(loaded), loaded, episodic=episodic, reasoning=False)


def test_the_check_of_a_template_lists_missing_features() -> None:
    found = shown(TEXT_ALONE)
    assert isinstance(found, Warned) and found.hint
    assert "does not show system messages, tools, tool calls, tool results" in found.text
    alone = shown(TEXT_ALONE, episodic=False)
    assert isinstance(alone, str) and "does not show" in alone, "rows that have any of it are refused one by one"
    refusing = shown(NO_SYSTEM)
    assert isinstance(refusing, Warned) and "system messages (System role not supported)" in refusing.text
    assert shown("own") == json.dumps("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("template", [None, "no messages"])
def test_a_template_that_cannot_be_used_is_a_mistake_of_the_spec(template: str | None) -> None:
    with pytest.raises(ConfigError) as refused:
        shown(template)
    assert refused.value.location == "model.chat_template" and refused.value.hint


def test_rows_without_a_file_are_named_by_the_key() -> None:
    assert row_location("data.eval", [], 1) == "data.eval:2"


def test_variables_that_the_template_does_not_read_are_refused() -> None:
    loaded = tokenizer()
    assert ChatTemplate(loaded).variables == {"enable_thinking"}
    check_template_kwargs(ChatTemplate(loaded), {"enable_thinking": False})
    with pytest.raises(ConfigError, match="does not read 'enable_thinkin'") as refused:
        check_template_kwargs(ChatTemplate(loaded), {"enable_thinkin": False})
    assert refused.value.location == "model.chat_template_kwargs.enable_thinkin"
    assert refused.value.hint == "did you mean `enable_thinking`?"
    with pytest.raises(ConfigError) as refused:
        check_template_kwargs(ChatTemplate(tokenizer(None)), {"x": 1})
    assert refused.value.hint == "remove it: the template reads none"
    check_template_kwargs(
        ChatTemplate(tokenizer("{% unknown_tag %}{{ x }}")), {"x": 1}
    )  # it is unknown whether it reads x
    marked = "{% generation %}{{ x }}{%- endgeneration -%}{% for m in messages %}{% break %}{% endfor %}"
    assert ChatTemplate(tokenizer(marked)).variables == {"x"}


def test_a_template_that_cannot_continue_a_conversation_is_a_warning() -> None:
    loaded = tokenizer()
    ends = frozenset({loaded.eos_token_id})
    assert check_turns(ChatTemplate(loaded), loaded, ends) == ""
    loaded.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function | tojson }}{% endfor %}{{ ';' if loop.last and m.tool_calls else eos_token }}{% endfor %}"
    )
    result = check_turns(ChatTemplate(loaded), loaded, ends)
    assert isinstance(result, Warned) and "ends tool calls differently when other messages follow" in result.text
    loaded.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token if loop.last else '' }}{% endfor %}"
    result = check_turns(ChatTemplate(loaded), loaded, ends)
    assert isinstance(result, Warned) and "ends texts and tool calls differently" in result.text


def reply_end(loaded: Any, ends: frozenset[int]) -> Result:
    return check_reply_end(ChatTemplate(loaded), loaded, ends)


def test_every_end_token_counts_and_a_template_that_ends_otherwise_is_named() -> None:
    loaded = tokenizer()
    ends = end_tokens(MODEL, loaded)
    assert loaded.convert_ids_to_tokens(sorted(ends)) == ["<|endoftext|>", "<|im_end|>"]
    assert reply_end(loaded, ends) == "replies end at '<|endoftext|>', '<|im_end|>'"
    assert isinstance(reply_end(tokenizer(HI), ends), str), "a template without an end of turns, like GLM's"
    lines = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    assert isinstance(reply_end(tokenizer(lines), ends), str), "a line break is not an end token"
    only_text = frozenset({loaded.convert_tokens_to_ids("<|endoftext|>")})
    found = reply_end(loaded, only_text)
    assert isinstance(found, Warned)
    assert "the chat template ends a reply with '<|im_end|>'" in found.text and "eos_token_id" in found.hint
    assert isinstance(reply_end(tokenizer(None), only_text), str)


def test_the_first_prompt_is_shown_with_its_special_tokens_and_number_of_tokens() -> None:
    loaded = tokenizer()
    found = shown_prompt([TEXT], PromptEncoder(loaded, 99))
    count = len(PromptEncoder(loaded, 99).encode(TEXT) or ())
    shown = json.dumps("<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert found == f"{count} tokens, by the chat template: {shown}"
    plain = shown_prompt([TEXT], PromptEncoder(loaded, 99, apply_chat_template=False))
    assert str(plain).endswith(' tokens, plain text: "2 + 2?"')
    variables = {"chat_template_kwargs": {"enable_thinking": False}}
    begun = Prompt("row", (ASKED, {"role": "assistant", "content": "It is"}), {"answer": "4", **variables})
    first, continues, *values = str(shown_prompt([begun], PromptEncoder(loaded, 99))).split("\n")
    assert first.endswith('It is"') and "continues the assistant message" in continues
    assert values == [
        "variables of the row: enable_thinking false",
        'fields for the task: answer "4", chat_template_kwargs {"enable_thinking": false}',
    ]


def test_special_tokens_in_a_text_stay_text_with_a_warning() -> None:
    loaded = tokenizer()
    twice = Prompt("twice", "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    found = shown_prompt([twice], PromptEncoder(loaded, 99))
    assert isinstance(found, Warned) and "'<|im_start|>' in the row stays text" in found.text
    assert "data.special_tokens" in found.hint and "data.apply_chat_template" in found.hint
    checked = check_prompts([twice, TEXT], PromptEncoder(loaded, 99), location="data.train", limit_s=9.0, locate=str)
    assert isinstance(checked, Warned) and "; 1 row with special tokens, such as '<|im_start|>'" in checked.text
    reading = PromptEncoder(loaded, 99, template=ChatTemplate(loaded, reads_special=True))
    assert isinstance(check_prompts([twice], reading, location="data.train", limit_s=9.0, locate=str), str)
    assert isinstance(shown_prompt([twice], PromptEncoder(loaded, 99, apply_chat_template=False)), str)
