"""Tables of responses for trackers, from evaluations and from every few training steps.

The tables are bounded: at most ``TABLES`` steps of a kind, ``ROWS`` responses of a step, ``CHARACTERS`` of a text.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import Any, NamedTuple

from asyncrl_cli.inspect.decoding import Decoder, content_text, open_decoder
from asyncrl_cli.inspect.report.held_out import evaluation_files, file_rows
from asyncrl_cli.inspect.resolved import setting
from asyncrl_cli.journal.queries import group_record, snapshot
from asyncrl_cli.journal.rollouts import rewarded_rollouts
from asyncrl_cli.journal.schema import FILE, JournalError
from asyncrl_cli.records.generation import sequence_of, training_rollout_id
from asyncrl_cli.runs.directory import RunDirectory

TRAINING = "training"
TABLES, ROWS, CHARACTERS = 64, 16, 4000

TableId = tuple[str, int]
"""A table's name (``training`` or an evaluation's kind) and its step."""


class ResponseRow(NamedTuple):
    """A response as trackers show it.

    ``parts`` has the task's metrics as JSON. Weight versions ``oldest_version`` to ``newest_version`` sampled the
    tokens. ``staleness`` is the oldest token's; None in an evaluation.
    """

    step: int
    prompt: str
    response: str
    reward: float | None
    parts: str
    oldest_version: int | None
    newest_version: int | None
    staleness: int | None


@dataclass(frozen=True, slots=True)
class ResponseTable:
    """Responses of one step, or of one evaluation."""

    name: str
    step: int
    rows: list[ResponseRow]


def table_interval(every: int, total_steps: int) -> int:
    """Steps between two tables: the smallest multiple of ``every`` that gives at most ``TABLES`` tables."""
    return every * max(1, ceil(total_steps / (every * TABLES)))


def response_tables(
    run: RunDirectory, spec: Mapping[str, Any], step: int, known_tables: Collection[TableId] = ()
) -> Iterator[ResponseTable]:
    """Yield the tables of the first ``step`` steps that are not in ``known_tables``; none if
    ``tracking.responses_every`` is 0. ``spec``: the run's resolved spec."""
    every = setting(spec, "tracking.responses_every", 0)
    if not every:
        return
    total_steps = max(step, run.state.steps)
    for file in evaluation_files(run.path):
        set_name = file.kind.rpartition(":")[0]
        set_every = setting(spec, "evaluation.every", 0)
        if set_name:
            set_every = setting(spec, f"evaluation.sets.{set_name}.every", set_every)
        is_due = file.step in (0, total_steps) or not set_every
        if not is_due and file.step % table_interval(set_every, total_steps):
            continue
        name = file.kind.replace(":", "-")
        if (name, file.step) in known_tables:
            continue
        if rows := [_evaluated(file.step, row) for row in islice(file_rows(file.path), 1, 1 + ROWS)]:
            yield ResponseTable(name, file.step, rows)
    interval = table_interval(every, total_steps)
    due_steps = [due for due in range(interval, step + 1, interval) if (TRAINING, due) not in known_tables]
    if due_steps:
        decoder = open_decoder(run)
        for due in due_steps:
            try:
                with snapshot(run.path / FILE) as connection:
                    rows = list(_trained(connection, due, decoder))
            except JournalError:  # the tracker's other data is still worth sending
                return
            if rows:
                yield ResponseTable(TRAINING, due, rows)


def _evaluated(step: int, row: Mapping[str, Any]) -> ResponseRow:
    return ResponseRow(
        step=step,
        prompt=_bounded(content_text(row.get("prompt", ""))),
        response=_bounded(str(row.get("response", ""))),
        reward=row.get("reward"),
        parts=json.dumps(row.get("metrics", {})),
        oldest_version=row.get("oldest"),
        newest_version=row.get("newest"),
        staleness=None,
    )


def _trained(connection: sqlite3.Connection, step: int, decoder: Decoder | None) -> Iterator[ResponseRow]:
    """Yield rollouts of a step (from 1), first one of each group. Without a decoder, a response is its token ids."""
    for trained in rewarded_rollouts(connection, step - 1, ROWS):
        group = group_record(connection, trained.group_id)
        name = training_rollout_id(trained.group_id, trained.rollout_index)
        rollout = next(rollout for rollout in group.rollouts if rollout.rollout_id == name)
        segments = [segment for segment in rollout.segments if sequence_of(segment.rollout_id)[-1] == 0]
        ids = [int(token) for segment in segments for token in segment.ids]
        text = " ".join(map(str, ids)) if decoder is None else decoder.split_text(ids, [len(ids)])[0]
        yield ResponseRow(
            step=step,
            prompt=_bounded(content_text(group.prompt.content)),
            response=_bounded(text),
            reward=trained.reward,
            parts=json.dumps(dict(rollout.metrics)),
            oldest_version=trained.oldest,
            newest_version=trained.newest,
            staleness=trained.staleness,
        )


def _bounded(text: str) -> str:
    return text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]} …"
