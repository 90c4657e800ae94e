"""Prompts to token ids: long prompts are skipped and counted, and the search has a limit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from stand_ins import prompts

from asyncrl_cli.core.errors import DataError, RunError
from asyncrl_cli.data.loader import PromptFilter, PromptLoader
from asyncrl_cli.data.prompt_encoder import PromptEncoder
from asyncrl_cli.data.tokenizer import character_tokenizer
from asyncrl_cli.orchestrator.outside_sessions import OutsideSessions
from asyncrl_cli.orchestrator.prompt_source import MAX_SKIPS_IN_A_ROW, SKIPPED_NAMED, PromptSource
from asyncrl_cli.records.prompt import Prompt

TOKENIZER = character_tokenizer(256)
CHAT = Prompt("chat", ({"role": "user", "content": "2+2="},))


def source(texts: list[str], first: tuple[Prompt, ...] = (), warn: Callable[[str], None] = print) -> PromptSource:
    rows = [Prompt(f"p{i}", text) for i, text in enumerate(texts)]
    return PromptSource(PromptLoader(rows, 0, shuffle=False), PromptEncoder(TOKENIZER, 3), first, warn=warn)


def test_a_chat_without_a_template_is_refused_with_a_hint() -> None:
    bare = character_tokenizer(256)
    bare.chat_template = None
    with pytest.raises(RunError, match="data: prompt chat is a chat, and the model's tokenizer has no chat template"):
        PromptEncoder(bare, 10).encode(CHAT)


def test_long_prompts_are_skipped_and_counted() -> None:
    warnings: list[str] = []
    stream = source(["123456789", "12", "1234567", "3"], warn=warnings.append)
    assert [stream.next()[0].uid for _ in range(4)] == ["p1", "p3", "p1", "p3"]
    assert stream.skipped == 4
    assert stream.loader.state() == {"epoch": 1, "position": 4}
    assert "prompt p0 is longer than rollout.max_prompt_tokens" in warnings[0]


def test_candidates_have_serials_and_the_loaders_position() -> None:
    stream = source(["1", "123456789", "2"], first=(Prompt("a", "4"),))
    candidates = [stream.candidate() for _ in range(4)]
    assert [candidate.serial for candidate in candidates] == [1, 2, 3, 4], "prompts that are too long do not count"
    assert [candidate.prompt.uid for candidate in candidates] == ["a", "p0", "p2", "p0"]
    assert [TOKENIZER.decode(candidate.prompt_ids) for candidate in candidates] == ["4", "1", "2", "1"]
    positions = [(candidate.loader["epoch"], candidate.loader["position"]) for candidate in candidates]
    assert positions == [(0, 0), (0, 1), (0, 3), (1, 1)]


async def test_a_programs_own_prompt_is_recorded_with_a_position_that_passes_over_no_row() -> None:
    stream = source(["1", "2", "3"])
    stream.encoder.sees_images = True
    own_prompts = [Prompt("outside/a", "4"), None]
    stream._outside = cast("OutsideSessions", SimpleNamespace(own_prompt=own_prompts.pop))
    assert await stream.prepare(2) == 2
    admitted = [stream.candidate() for _ in range(2)]
    assert [(candidate.prompt.uid, candidate.loader["position"]) for candidate in admitted] == [
        ("p0", 1),
        ("outside/a", 1),
    ]


@pytest.mark.parametrize("admitted", range(8))
def test_a_resumed_stream_continues_after_the_newest_admitted_prompt(admitted: int) -> None:
    texts = ["1", "123456789", "2", "3"]
    before = source(texts)
    candidates = [before.candidate() for _ in range(10)]
    resumed = source(texts)
    resumed.resume(admitted, candidates[admitted - 1].loader if admitted else None)
    assert [resumed.candidate() for _ in range(10 - admitted)] == candidates[admitted:]


def test_only_long_prompts_end_the_search() -> None:
    asked = []

    class Encoder(PromptEncoder):
        def encode_with_images(self, prompt: Prompt) -> None:
            asked.append(prompt)

    stream = PromptSource(PromptLoader(prompts(3), 0, shuffle=True), Encoder(TOKENIZER, 1))
    with pytest.raises(RunError, match=r"data\.train: 10000 prompts in a row .* is longer than rollout\."):
        stream.next()
    assert len(asked) == stream.skipped == MAX_SKIPS_IN_A_ROW


def test_solved_prompts_are_skipped_until_all_are_solved() -> None:
    warnings: list[str] = []
    rows = [Prompt(f"p{i}", "1") for i in range(4)]
    stream = PromptSource(
        PromptLoader(rows, 0, shuffle=False),
        PromptEncoder(TOKENIZER, 3),
        prompt_filter=PromptFilter(1, 0.0, 0),
        warn=warnings.append,
    )
    stream.visited("p1", solved=True)
    stream.visited("p2", solved=True)
    assert [stream.next()[0].uid for _ in range(5)] == ["p0", "p3", "p0", "p3", "p0"]
    stream.visited("p2", solved=False)
    assert [stream.next()[0].uid for _ in range(3)] == ["p2", "p3", "p0"]
    assert not warnings
    for row in rows:
        stream.visited(row.uid, solved=True)
    drawn = [stream.next()[0].uid for _ in range(8)]
    assert set(drawn) <= {row.uid for row in rows}, "training continues"
    assert warnings == ["every training prompt is solved (data.filter), so solved prompts are trained on again"]


REFUSING = character_tokenizer(256)
REFUSING.chat_template = "{{ raise_exception('a system message comes first') }}"


def test_a_prompt_that_cannot_be_encoded_is_named() -> None:
    with pytest.raises(DataError, match=r"data: the prompt 'chat' cannot be encoded: .*a system message comes first"):
        PromptEncoder(REFUSING, 10).encode(CHAT)
    with pytest.raises(DataError, match="the prompt 'half' cannot be encoded: "):
        PromptEncoder(TOKENIZER, 10).encode(Prompt("half", "\ud83d"))
    with pytest.raises(DataError, match="the prompt 'empty' has no tokens"):
        PromptEncoder(TOKENIZER, 10).encode(Prompt("empty", ""))


def test_rows_that_cannot_be_used_are_skipped_counted_and_named() -> None:
    warnings: list[str] = []
    rows = [Prompt("a", "1"), CHAT, Prompt("b", "2")]

    class Rows(list[Prompt]):
        def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
            if index == 2:
                raise DataError("the row is not a prompt", location="rows.parquet:3")
            return super().__getitem__(index)

    stream = PromptSource(
        PromptLoader(Rows([*rows]), 0, shuffle=False),
        PromptEncoder(REFUSING, 10, apply_chat_template=False),
        unused_prompts=(CHAT,),
        warn=warnings.append,
    )
    assert [stream.next()[0].uid for _ in range(20)] == ["a"] * 20
    assert stream.skipped == 1 + 2 * 19
    assert "the prompt 'chat' cannot be encoded" in warnings[0]
    assert "rows.parquet:3: the row is not a prompt" in warnings[2]
    assert len(warnings) == SKIPPED_NAMED


def test_text_parts_are_text_for_every_template() -> None:
    parts = ({"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2="}]},)
    encoder = PromptEncoder(TOKENIZER, 10)
    assert encoder.encode(Prompt("parts", parts)) == encoder.encode(CHAT)
