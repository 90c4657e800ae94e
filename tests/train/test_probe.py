"""The probe is the part where the task's prompts differ, extended by ordinary text if that is too short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.data.tokenizer import character_tokenizer
from asyncrl_cli.train.model.probe import LEAST_TOKENS, PROBE_TOKENS, PROMPTS, TOKENS_OF_EACH, probe_ids, prompt_tokens

TOKENIZER = character_tokenizer(256)
IDS = st.lists(st.integers(3, 98), min_size=1, max_size=60)


@given(system=st.lists(st.integers(3, 98), max_size=40), prompts=st.lists(IDS, min_size=2, max_size=20))
def test_common_beginning_of_all_prompts_is_skipped(system: list[int], prompts: list[list[int]]) -> None:
    prompts = [[first, *rest] for first, rest in zip(range(1000, 1020), prompts, strict=False)]
    found = prompt_tokens([*system, *rest] for rest in prompts)
    expected = [token for rest in prompts[:PROMPTS] for token in rest[:TOKENS_OF_EACH]]
    assert found == tuple(expected[:PROBE_TOKENS])


@given(ids=IDS, count=st.integers(1, 20))
def test_equal_prompts_are_kept(ids: list[int], count: int) -> None:
    head = tuple(ids[:TOKENS_OF_EACH])
    assert prompt_tokens([ids] * count)[: len(head)] == head
    assert prompt_tokens([]) == ()


@given(prompt_ids=st.lists(st.integers(3, 200), max_size=120), length=st.integers(1, PROBE_TOKENS))
def test_probe_has_enough_tokens_that_the_model_knows(prompt_ids: list[int], length: int) -> None:
    ids = probe_ids(prompt_ids, TOKENIZER, 99, length)
    own = tuple(token for token in prompt_ids if token < 99)
    assert ids[: len(own)] == own[:length]
    assert len(ids) == min(length, max(LEAST_TOKENS, len(own)))
    assert max(ids) < 99


def test_probe_without_prompts_is_ordinary_text() -> None:
    ids = probe_ids((), TOKENIZER, 99, PROBE_TOKENS)
    assert len(ids) == LEAST_TOKENS
    assert TOKENIZER.decode(ids).startswith("Tom has 3")
    with pytest.raises(ValueError, match="no token of the model"):
        probe_ids((), TOKENIZER, 3, PROBE_TOKENS)
