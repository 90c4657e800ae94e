"""Rollouts to read: some that were trained, from different parts of the run, and held-out ones before and after."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

from asyncrl_cli.inspect.decoding import Decoder, TokenShown, content_text, reference_text, tokens_of
from asyncrl_cli.inspect.report.recorded_files import EvaluationFile, evaluation_samples
from asyncrl_cli.journal.queries import group_record
from asyncrl_cli.journal.rollouts import Extreme, TrainedRollout, extreme_rollouts, trained_steps
from asyncrl_cli.records.generation import training_rollout_id
from asyncrl_cli.records.training import CORRECT

EACH = 3
"""Rollouts of a kind, each from another part of the run."""
LOOKED_AT = 50
"""Rows read per sample, to find a rollout of a group that is not shown yet."""
TOKENS_SHOWN = 600
HELD_OUT_EACH = 3
"""Held-out prompts of a kind."""
RESPONSE_SHOWN = 1500
"""Characters of a held-out response."""

KINDS: tuple[Extreme, ...] = get_args(Extreme)


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout, its first sequence. ``left_out`` tokens are not shown; ``staleness`` is in versions, ``step`` from
    1; ``reference`` is the right answer, as far as the prompt's fields have it."""

    kind: str
    rollout_id: str
    uid: str
    prompt: str
    reference: str
    reward: float
    tokens: int
    staleness: int
    step: int
    shown: tuple[TokenShown, ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class Response:
    """An answer to a held-out prompt after so many steps."""

    step: int
    text: str
    correct: bool
    reward: float


@dataclass(frozen=True, slots=True)
class HeldOutSample:
    """A held-out prompt, and what was answered before and after."""

    uid: str
    prompt: str
    reference: str
    before: Response
    after: Response


def samples(connection: sqlite3.Connection, decoder: Decoder | None) -> list[Sample]:
    """Up to ``EACH`` of each kind, of different groups and from different parts of the run."""
    if (steps := trained_steps(connection)) is None:
        return []
    first, last = steps
    parts = min(EACH, last - first + 1)
    borders = [first + (last - first + 1) * part // parts for part in range(parts + 1)]
    known: set[int] = set()
    found = []
    for kind in KINDS:
        for begin, end in reversed(list(pairwise(borders))):
            rows = extreme_rollouts(connection, kind, range(begin, end), LOOKED_AT * EACH * len(KINDS))
            if (row := next((row for row in rows if row.group_id not in known), None)) is not None:
                known.add(row.group_id)
                found.append(_sample(connection, decoder, kind, row))
    return found


def _sample(connection: sqlite3.Connection, decoder: Decoder | None, kind: Extreme, row: TrainedRollout) -> Sample:
    group = group_record(connection, row.group_id)
    rollout = next(
        one for one in group.rollouts if one.rollout_id == training_rollout_id(row.group_id, row.rollout_index)
    )
    shown, left_out = tokens_of(rollout, decoder, TOKENS_SHOWN)
    return Sample(
        kind=kind,
        rollout_id=rollout.rollout_id,
        uid=group.row.uid,
        prompt=content_text(group.prompt.content),
        reference=reference_text(group.prompt.fields),
        reward=row.reward,
        tokens=rollout.tokens,
        staleness=row.staleness,
        step=row.step + 1,
        shown=shown,
        left_out=left_out,
    )


def held_out_samples(before: EvaluationFile, after: EvaluationFile) -> list[HeldOutSample]:
    """Prompts of two evaluations: some whose answer is right only in the later one, and some whose answer is wrong
    there."""
    earlier = {str(row.get("uid")): row for row in evaluation_samples(before)}
    wrong: list[HeldOutSample] = []
    learned: list[HeldOutSample] = []
    for one in _pairs(earlier, before.step, evaluation_samples(after), after.step):
        if not one.after.correct and len(wrong) < HELD_OUT_EACH:
            wrong.append(one)
        if one.after.correct and not one.before.correct and len(learned) < HELD_OUT_EACH:
            learned.append(one)
        if len(wrong) == len(learned) == HELD_OUT_EACH:
            break
    return [*learned, *wrong]


def _pairs(
    earlier: Mapping[str, Mapping[str, Any]], step: int, later: Iterator[Mapping[str, Any]], later_step: int
) -> Iterator[HeldOutSample]:
    for row in later:
        uid = str(row.get("uid"))
        if uid in earlier:
            yield HeldOutSample(
                uid=uid,
                prompt=content_text(row.get("prompt", "")),
                reference=str(row.get("answer", ""))[:RESPONSE_SHOWN],
                before=_response(earlier[uid], step),
                after=_response(row, later_step),
            )


def _response(row: Mapping[str, Any], step: int) -> Response:
    reward = row.get("reward")
    known = float(reward) if isinstance(reward, int | float) else 0.0
    return Response(step, str(row.get("response", ""))[:RESPONSE_SHOWN], known >= CORRECT, known)
