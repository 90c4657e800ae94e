"""The character tokenizer: one token per character, in both directions."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.data.chat_template import ChatTemplate
from asyncrl_cli.data.tokenizer import CHARACTERS, character_tokenizer, load_tokenizer, with_chat_template
from asyncrl_cli.rollout.response_text import end_tokens

TOKENIZER = character_tokenizer(256)


@given(st.text(CHARACTERS))
def test_text_survives_the_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    if "<" not in text:
        assert len(ids) == len(text)


def test_vocabulary_begins_with_special_tokens() -> None:
    assert len(TOKENIZER) == 99
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.unk_token_id) == (0, 1, 2)
    assert TOKENIZER.encode("aé\n") == [TOKENIZER.convert_tokens_to_ids("a"), 2, 3]
    assert TOKENIZER.decode([*TOKENIZER.encode("#4"), 1], skip_special_tokens=True) == "#4"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_of_several_templates_the_default_is_chosen(tmp_path: Path) -> None:
    saved = character_tokenizer(256)
    saved.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "tools: {{ messages[0].content }}"}
    saved.save_pretrained(tmp_path)
    assert ChatTemplate(load_tokenizer(tmp_path, None)).text([{"role": "user", "content": "hi"}]) == "hi"
    del saved.chat_template["default"]
    with pytest.raises(ConfigError, match=r"several chat templates \(tool_use\), and none named `default`"):
        with_chat_template(saved, None)


def test_chat_messages_stand_one_behind_the_other(loaded: Any) -> None:
    messages = [
        {"role": "user", "content": "2+2="},
        {"role": "assistant", "content": "#4"},
        {"role": "user", "content": "ok?"},
    ]
    assert loaded.apply_chat_template(messages[:1], tokenize=False) == "2+2="
    ids = loaded.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert ids == [*loaded.encode("2+2="), *loaded.encode("#4"), loaded.eos_token_id, *loaded.encode("ok?")]


def test_tool_calls_and_results_are_written_as_hermes_and_in_brackets(loaded: Any) -> None:
    call = {"type": "function", "function": {"name": "calc", "arguments": {"e": "37*48"}}}
    messages = [
        {"role": "user", "content": "37*48="},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1776"},
        {"role": "assistant", "content": "#1776"},
    ]
    texts = [loaded.apply_chat_template(messages[:count], tokenize=False) for count in range(1, 5)]
    written = '<tool_call>{"name": "calc", "arguments": {"e": "37*48"}}</tool_call>'
    assert texts[-1] == f"37*48={written}<eos>[1776]#1776<eos>"
    assert all(texts[-1].startswith(text) for text in texts), "a chat's first messages give its first tokens"
    call["function"]["arguments"] = '{"e": "37*48"}'  # type: ignore[index]
    assert loaded.apply_chat_template(messages, tokenize=False) == texts[-1], "as in a program"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [1, 106]}, {}, {1, 106}),
        ({"eos_token_id": 7}, {"eos_token_id": 9}, {1, 7}),
        ({}, {"eos_token_id": 9}, {1}),
        (None, {"eos_token_id": [1, 9]}, {1, 9}),
    ],
)
def test_end_tokens_equal_the_tokens_at_which_engines_stop(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any], expected: set[int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert end_tokens(tmp_path, TOKENIZER) == expected
