"""Rows to learn from: their tokens are the same as in a run, and only replies are learned."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.checks.finding import Warned
from asyncrl_cli.checks.prompts import check_rows
from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.prompt_encoder import PromptEncoder
from asyncrl_cli.data.supervised_rows import RowEncoder, Rows, encode_rows
from asyncrl_cli.data.tokenizer import CHAT_TEMPLATE, character_tokenizer
from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import WarmStart

pytestmark = pytest.mark.slow

CHATML = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""As in Qwen's template: text follows the end token."""
THINKS = CHATML.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' and loop.last %}<think>{% endif %}{{ m.content }}"
)
"""As in Qwen3's template: the last reply is rendered differently from earlier ones."""
TEXTS = st.text("ab ", max_size=4)
CHATS = st.lists(st.tuples(st.text("ab ", min_size=1, max_size=4), TEXTS), min_size=1, max_size=4).map(
    lambda turns: tuple(
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    )
)


def encoder(template: str | None = CHATML, texts_are_chats: bool = True, **keys: Any) -> RowEncoder:
    tokenizer = character_tokenizer(256)
    tokenizer.chat_template = template
    prompts = PromptEncoder(tokenizer, 256)
    prompts._texts_are_chats = texts_are_chats
    warm_start = WarmStart.model_validate({"steps": 1, "data": {"path": "rows.jsonl"}, **keys})
    return RowEncoder(prompts, frozenset({tokenizer.eos_token_id}), warm_start)


def spec_with(max_length: int, max_response_tokens: int = 100) -> Any:
    """The lengths of a spec."""
    return SimpleNamespace(
        model=SimpleNamespace(max_length=max_length), rollout=SimpleNamespace(max_response_tokens=max_response_tokens)
    )


def learned(one: RowEncoder, prompt: Prompt) -> list[str]:
    """The text of each stretch of learned tokens."""
    stretches: list[list[int]] = []
    ids, mask, _ = one.encode(prompt)
    for index, (token, counts) in enumerate(zip(ids, mask, strict=True)):
        if counts:
            stretches += [] if mask[index - 1] else [[]]
            stretches[-1].append(token)
    return [one.prompts.tokenizer.decode(stretch) for stretch in stretches]


@given(CHATS, st.sampled_from([CHATML, CHAT_TEMPLATE]))
def test_every_reply_is_learned_with_its_end_after_the_tokens_that_a_run_has(chat: Any, template: str) -> None:
    one = encoder(template, train_on="all")
    ids, mask, _ = one.encode(Prompt("1", chat))
    replies = [message["content"] for message in chat if message["role"] == "assistant"]
    assert learned(one, Prompt("1", chat)) == [f"{reply}<eos>" for reply in replies]
    shown = ChatFormat(one.prompts.tokenizer)
    at = 0
    for index in range(1, len(chat), 2):
        at = mask.index(True, at)
        assert list(ids[:at]) == list(shown.render(chat[:index]).ids), (
            "what the gateway sends to the engine before this reply"
        )
        at += len(replies[index // 2]) + 1
    assert at == len(ids)
    last = encoder(template)
    assert learned(last, Prompt("1", chat)) == [f"{replies[-1]}<eos>"]
    assert last.encode(Prompt("1", chat))[0] == ids


def test_two_columns_are_a_chat_or_a_text() -> None:
    row = Prompt("1", "hi", {"answer": "yes"})
    one = encoder(response_column="answer")
    assert one.prompts.tokenizer.decode(one.encode(row)[0]) == "[user]hi<eos>\n[assistant]yes<eos>"
    plain = encoder(texts_are_chats=False, response_column="answer")
    assert plain.prompts.tokenizer.decode(plain.encode(row)[0]) == "hiyes<eos>"
    assert learned(one, row) == learned(plain, row) == ["yes<eos>"]


@pytest.mark.parametrize(
    ("template", "keys", "row", "says"),
    [
        (
            THINKS,
            {"train_on": "all"},
            ("user", "assistant", "user", "assistant"),
            "renders the first 1 messages differ",
        ),
        (
            CHATML.replace("{{ eos_token }}", ""),
            {"train_on": "all"},
            ("user", "assistant", "user", "assistant"),
            "ends a",
        ),
        (CHATML, {}, ("user", "assistant", "user"), "does not end with an assistant's message"),
        (CHAT_TEMPLATE.replace("{{ message['content'] or '' }}", ""), {}, ("user", "assistant"), "no text before"),
        (CHATML, {}, ("user", "assistant", "assistant"), "two assistant messages"),
        (CHATML, {}, ("assistant",), "does not end with an assistant's message after another"),
        (CHATML, {"response_column": "answer"}, ("user",), "the row has no text in the column `answer`"),
    ],
)
def test_rows_that_would_teach_something_else_are_refused_with_their_line(
    tmp_path: Path, template: str, keys: dict[str, Any], row: tuple[str, ...], says: str
) -> None:
    good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = tmp_path / "rows.jsonl"
    lines = [good, [{"role": role, "content": "c"} for role in row]]
    file.write_text("\n\n".join(json.dumps({"messages": line, "answer": None}) for line in lines))
    one = encoder(template, data={"path": str(file), "prompt_column": "messages"}, **keys)
    rows = Rows.from_spec(one.warm_start, tmp_path)
    with pytest.raises(DataError, match=says) as refused:
        encode_rows(rows, one, 100)
    line = 1 if "response_column" in keys or "before" in says else 3
    assert refused.value.location == f"{file}:{line}" and refused.value.hint
    with pytest.raises(DataError, match=says):
        check_rows(rows, one, spec_with(100), limit_s=60.0)


def test_the_last_reply_of_a_template_that_changes_earlier_ones_is_learned() -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    chat = tuple({"role": role, "content": text} for role, text in turns)
    assert learned(encoder(THINKS), Prompt("1", chat)) == ["<think>d<eos>"]


def test_long_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    one = encoder(response_column="answer")
    prompts = [Prompt(str(length), "hi", {"answer": "x" * length}) for length in (4, 90, 5, 80)]
    rows = Rows(prompts, str)
    assert len(encode_rows(rows, one, 50)) == 2
    result = check_rows(rows, one, spec_with(50), limit_s=60.0)
    assert "up to 91 tokens; 2 are longer than model.max_length and skipped" in str(result)
    result = check_rows(rows, one, spec_with(50, max_response_tokens=90), limit_s=60.0)
    assert isinstance(result, Warned) and result.hint == "raise rollout.max_response_tokens to 91"
    for check in (lambda: encode_rows(rows, one, 5), lambda: check_rows(rows, one, spec_with(5), limit_s=60.0)):
        with pytest.raises(DataError, match=r"longer than model\.max_length"):
            check()
