"""Recorded expert choices are stored with their tokens; without them nothing is written."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from buffer_stand_ins import PROMPT_IDS, SETTINGS, commit, fill, group_outcomes, opened, pieces, prune, rollout, rows_in

from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.journal.schema import JournalError
from asyncrl_cli.records.experts import Experts
from asyncrl_cli.records.generation import Rollout

WIDTH = 6
VERSIONS = (0, 0, 1, 1, 1)


def rows_for(tokens: int, seed: int, dtype: type = np.uint8) -> Experts:
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, (tokens, WIDTH)).astype(dtype)


def routed(rollout_id: str, dtype: type = np.uint8, seed: int = 0) -> Rollout:
    plain = rollout(rollout_id, VERSIONS, seed)
    return replace(
        plain,
        experts=rows_for(len(VERSIONS), 2 * seed, dtype),
        prompt_experts=rows_for(len(PROMPT_IDS), 2 * seed + 1, dtype),
    )


def running(path: Path) -> tuple[DurableLedger, tuple[int, ...]]:
    book = opened(path)
    fill(book)
    return book, book.ledger.running


def same(one: Experts | None, other: Experts | None) -> bool:
    assert one is not None
    assert other is not None
    return one.dtype == other.dtype and np.array_equal(one, other)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_batch_has_the_experts_that_its_rollouts_had(path: Path, dtype: type) -> None:
    book, (one, other, *_) = running(path)
    given = {
        group: [routed(f"{group}-{index}", dtype, 7 * group + index) for index in (0, 1)] for group in (one, other)
    }
    for group, rollouts in given.items():
        book.record(rollouts)
        book.score(group_outcomes(group))
    assert book.take(0) is None
    commit(book)
    book.journal.close()
    book = DurableLedger(path, SETTINGS)  # as after a kill
    for group in book.journal.batch(0).groups:
        for expected, found in zip(given[group.group_id], group.rollouts, strict=True):
            assert same(found.experts, expected.experts)
            assert same(found.prompt_experts, expected.prompt_experts)


def test_unfinished_and_unscored_rollouts_keep_their_experts(path: Path) -> None:
    book, (group, *_) = running(path)
    unfinished, unscored = routed(f"{group}-0", seed=1), routed(f"{group}-1", seed=2)
    for piece in (*pieces(unfinished, 0, 1), *pieces(unfinished, 1, 4)):
        book.grown([piece])
    book.record([unscored])
    commit(book)
    book.journal.close()
    found = DurableLedger(path, SETTINGS).opening().groups[0]
    assert unfinished.experts is not None
    segments = found.prefixes[0][0]
    assert same(np.concatenate([segment.experts for segment in segments]), unfinished.experts[:4])
    assert same(found.unscored[1].experts, unscored.experts)
    assert same(found.unscored[1].prompt_experts, unscored.prompt_experts)


def test_tokens_that_are_generated_again_have_the_new_experts(path: Path) -> None:
    book, (group, *_) = running(path)
    first, again = routed(f"{group}-0", seed=1), routed(f"{group}-0", seed=2)
    book.grown(pieces(first))
    book.grown(pieces(replace(again, experts=None), 0, 2))  # by an engine that does not record experts
    commit(book)
    assert rows_in(path, "experts") == 0
    book.grown(pieces(again, 2))
    commit(book)
    assert rows_in(path, "experts") == 1
    book.record([again])
    commit(book)
    book.journal.close()
    found = DurableLedger(path, SETTINGS).opening().groups[0].unscored[0]
    assert same(found.experts, again.experts)


def test_tokens_without_experts_write_none_and_pruning_deletes_recorded_experts(path: Path) -> None:
    book, (one, other, *_) = running(path)
    book.record([rollout(f"{one}-{index}", VERSIONS) for index in (0, 1)])
    commit(book)
    assert rows_in(path, "experts") == 0
    book.record([routed(f"{other}-{index}") for index in (0, 1)])
    for group in (one, other):
        book.score(group_outcomes(group))
    assert book.take(0) is None
    commit(book)
    plain, with_experts = book.journal.batch(0).groups
    assert plain.rollouts[0].experts is plain.rollouts[0].prompt_experts is None
    assert with_experts.rollouts[0].experts is not None
    prune(book, 1)
    assert rows_in(path, "experts") == 0


def test_damaged_experts_are_found(path: Path) -> None:
    book, (group, *_) = running(path)
    book.record([routed(f"{group}-0")])
    commit(book)
    book.journal.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE experts SET ids = CAST(substr(ids, 1, length(ids) - 1) || x'63' AS BLOB)")
        connection.commit()
    with pytest.raises(JournalError, match=f"the experts of rollout {group}-0 have a wrong checksum"):
        DurableLedger(path, SETTINGS).opening()
