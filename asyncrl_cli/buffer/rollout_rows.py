"""Recorded rollouts: how tokens become columns of the journal, and how rows become rollouts and batches again.

Arrays are raw little-endian bytes. Every reading of tokens is checked against their CRC.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from asyncrl_cli.data.prompts import Prompt, prompt_from
from asyncrl_cli.rollout.records import Rollout, Segment, branch_id, training_rollout_id
from asyncrl_cli.train.records import TrainingBatch, TrainingGroup

TOKENS, LOGPROBS = np.dtype("<i4"), np.dtype("<f4")


def read_batch(connection: sqlite3.Connection, step: int) -> TrainingBatch:
    """The batch of a step, as it was taken. Raises ``LookupError`` when it is not there, or its tokens are pruned.

    Texts are left empty: training needs none.
    """
    found = connection.execute("SELECT version FROM batches WHERE step = ?", (step,)).fetchone()
    if found is None:
        raise LookupError(f"step {step} has no batch")
    rows = connection.execute(
        """
        SELECT g.id, r.place, g.uid, g.version, g.prompt_ids, r.reward, r.metrics, r.finish_reason, r.tokens,
               s.branch, s.start, s.version, s.tokens, s.logprobs, s.crc
        FROM groups g JOIN rollouts r ON r.group_id = g.id
        LEFT JOIN segments s ON s.group_id = r.group_id AND s.place = r.place
        WHERE g.step = ? ORDER BY g.id, r.place, s.branch, s.start
        """,
        (step,),
    )
    groups = []
    for group_id, of_group in groupby(rows, key=lambda row: row[0]):
        rollouts, rewards, measured, uid, version = [], [], [], "", 0
        for place, parts in groupby(of_group, key=lambda row: row[1]):
            cut = list(parts)
            _, _, uid, version, prompt_ids, reward, metrics, finish_reason, tokens, branch, *_ = cut[0]
            if tokens and branch is None:
                raise LookupError(f"the tokens of step {step} are pruned")
            sequences = _by_branch(group_id, place, [] if branch is None else [row[9:] for row in cut])
            ids = tuple(np.frombuffer(prompt_ids, TOKENS).tolist())
            rollouts.append(rollout_of(group_id, place, ids, sequences, finish_reason))
            rewards.append(reward)
            measured.append(json.loads(metrics) if metrics else {})
        found_metrics = tuple(measured) if any(measured) else ()
        groups.append(TrainingGroup(group_id, uid, version, tuple(rollouts), tuple(rewards), found_metrics))
    return TrainingBatch(step, found[0], tuple(groups))


def sequences_of(connection: sqlite3.Connection, group_id: int, place: int) -> dict[int, tuple[Segment, ...]]:
    """The recorded segments of a rollout's sequences, by branch. Raises ``sqlite3.DatabaseError`` for damaged ones."""
    rows = connection.execute(
        "SELECT branch, start, version, tokens, logprobs, crc FROM segments WHERE group_id = ? AND place = ? "
        "ORDER BY branch, start",
        (group_id, place),
    )
    return _by_branch(group_id, place, rows)


def _by_branch(group_id: int, place: int, rows: Iterable[Sequence[Any]]) -> dict[int, tuple[Segment, ...]]:
    """Segments from rows of branch, start, version, tokens, logprobs and crc that are sorted."""
    name = training_rollout_id(group_id, place)
    return {
        branch: tuple(_segment(branch_id(name, branch), *row[1:]) for row in of_branch)
        for branch, of_branch in groupby(rows, key=lambda row: row[0])
    }


def columns_of(segment: Segment) -> tuple[int, int, bytes, bytes, int]:
    """The columns ``start``, ``version``, ``tokens``, ``logprobs`` and ``crc``."""
    tokens = segment.response_ids.astype(TOKENS, copy=False).tobytes()
    logprobs = segment.logprobs.astype(LOGPROBS, copy=False).tobytes()
    return segment.start, segment.version, tokens, logprobs, _crc(tokens, logprobs)


def _crc(tokens: bytes, logprobs: bytes) -> int:
    return zlib.crc32(logprobs, zlib.crc32(tokens))


def _segment(name: str, start: int, version: int, tokens: bytes, logprobs: bytes, crc: int) -> Segment:
    if _crc(tokens, logprobs) != crc:
        raise sqlite3.DatabaseError(f"the tokens of rollout {name} are malformed")
    return Segment(name, start, version, np.frombuffer(tokens, TOKENS), np.frombuffer(logprobs, LOGPROBS))


def rollout_of(
    group_id: int,
    place: int,
    prompt_ids: tuple[int, ...],
    sequences: Mapping[int, Sequence[Segment]],
    finish_reason: Any,
) -> Rollout:
    """A rollout with its branches, which are said to have ended as it did: how is not recorded of them."""
    name = training_rollout_id(group_id, place)
    root, *branches = (
        _sequence(branch_id(name, branch), prompt_ids, sequences.get(branch, ()), finish_reason)
        for branch in sorted({0, *sequences})
    )
    return replace(root, branches=tuple(branches)) if branches else root


def _sequence(name: str, prompt_ids: tuple[int, ...], segments: Sequence[Segment], finish_reason: Any) -> Rollout:
    return Rollout(
        rollout_id=name,
        prompt_ids=prompt_ids,
        response_ids=np.concatenate([np.empty(0, np.int32), *(s.response_ids for s in segments)]),
        logprobs=np.concatenate([np.empty(0, np.float32), *(s.logprobs for s in segments)]),
        versions=np.repeat(
            np.asarray([s.version for s in segments], np.int32), [len(s.response_ids) for s in segments]
        ),
        text="",
        finish_reason=finish_reason,
    )


def prompt_of(uid: str, content: str, fields: str) -> Prompt:
    """A prompt from the columns of its group."""
    return prompt_from({"uid": uid, "content": json.loads(content), "fields": json.loads(fields)})
