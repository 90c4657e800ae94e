"""What must hold for the journal of a complete run, whatever happened during the run.

Nothing here depends on the injected faults: the project's promises are checked on the rows.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl_cli.journal.rollout_rows import read_batch
from asyncrl_cli.orchestrator.metrics import batch_digest
from asyncrl_cli.records.generation import CONTEXT, branch_id, training_rollout_id
from asyncrl_cli.records.groups import BufferSettings
from asyncrl_cli.records.training import TrainingBatch


@dataclass(frozen=True, slots=True)
class Audit:
    """What was counted and found. ``staleness`` is the highest of any group."""

    groups: int
    rollouts: int
    mixed_rollouts: int
    staleness: int
    violations: tuple[str, ...]


def audit(connection: sqlite3.Connection, steps: int, uid_of: Callable[[int], str]) -> Audit:
    """Check the journal of a run of ``steps`` steps that has ended.

    ``uid_of(serial)`` is the prompt that the data loader gives as the run's ``serial``-th, counted from 1.
    """
    meta = {key: json.loads(value) for key, value in connection.execute("SELECT key, value FROM meta")}
    settings = BufferSettings(**meta["settings"])
    violations = [
        *_history(connection, steps, settings),
        *_admissions(connection, uid_of),
        *_leftovers(connection),
        *_segments(connection),
    ]
    groups = rollouts = mixed = staleness = 0
    trained: Counter[str] = Counter()
    for step in range(steps):
        try:
            batch = read_batch(connection, step)  # raises if a CRC or a segment's key is wrong, or a reward is missing
        except Exception as error:
            violations.append(f"step {step}: its batch cannot be read: {type(error).__name__}: {error}")
            continue
        violations += _batch(connection, batch, settings)
        groups += len(batch.groups)
        staleness = max(staleness, *batch.staleness, 0)
        for group in batch.groups:
            trained[f"{group.uid} of group {group.group_id}"] += 1
            rollouts += len(group.rollouts)
            mixed += sum(len(set(rollout.sampled_versions.tolist())) > 1 for rollout in group.rollouts)
    violations += [f"{group} is trained {count} times" for group, count in trained.items() if count > 1]
    return Audit(groups, rollouts, mixed, staleness, tuple(violations))


def _history(connection: sqlite3.Connection, steps: int, settings: BufferSettings) -> Iterator[str]:
    taken = [step for (step,) in connection.execute("SELECT step FROM batches ORDER BY step")]
    if taken != list(range(steps)):
        yield f"batches are those of steps {_gaps(taken, steps)}, instead of 0 to {steps - 1}"
    for (step,) in connection.execute("SELECT step FROM batches WHERE trained_at IS NULL"):
        yield f"step {step} was never reported as trained"
    published = [version for (version,) in connection.execute("SELECT version FROM publishes ORDER BY version")]
    if published != list(range(steps // settings.publish_every + 1)):
        yield f"published are {_gaps(published, steps // settings.publish_every + 1)}"


def _gaps(found: list[int], wanted: int) -> str:
    missing = sorted(set(range(wanted)) - set(found))
    return f"{len(found)}, without {missing[:5]}" if missing else f"{len(found)}"


def _admissions(connection: sqlite3.Connection, uid_of: Callable[[int], str]) -> Iterator[str]:
    """Every prompt in the loader's order, once; requeued prompts have no serial and run again."""
    rows = connection.execute("SELECT id, serial, uid FROM groups WHERE serial IS NOT NULL ORDER BY id").fetchall()
    for expected, (group_id, serial, uid) in enumerate(rows, start=1):
        if serial != expected:
            yield f"group {group_id} has prompt number {serial}, where {expected} comes next"
            break
        if uid != uid_of(serial):
            yield f"group {group_id} has the prompt {uid}, where {uid_of(serial)} comes next"
            break
    requeued = Counter(uid for (uid,) in connection.execute("SELECT uid FROM groups WHERE state = 'requeued'"))
    again = Counter(uid for (uid,) in connection.execute("SELECT uid FROM groups WHERE serial IS NULL"))
    if requeued != again:
        yield f"requeued are {requeued - again}, started again {again - requeued}"


def _leftovers(connection: sqlite3.Connection) -> Iterator[str]:
    """Every admitted group has ended: it was trained, rejected or requeued."""
    for state, count in connection.execute(
        "SELECT state, count(*) FROM groups WHERE state IN ('running', 'finished') GROUP BY state"
    ):
        yield f"{count} groups are still {state}"
    for group_id, state in connection.execute(
        "SELECT id, state FROM groups WHERE (state = 'taken') != (step IS NOT NULL)"
    ):
        yield f"group {group_id} is {state}, which contradicts its step"


def _segments(connection: sqlite3.Connection) -> Iterator[str]:
    """The segments of a sequence follow each other without gaps from token 0, and those of a rollout have as many
    sampled tokens as its row states."""
    ends: dict[tuple[int, int, int], int] = {}
    sampled: Counter[tuple[int, int]] = Counter()
    for *sequence, start, version, tokens in connection.execute(
        "SELECT group_id, rollout_index, branch, start, version, length(tokens) / 4 FROM segments "
        "ORDER BY group_id, rollout_index, branch, start"
    ):
        group_id, index, branch = sequence
        if start != ends.get((group_id, index, branch), 0):
            name = branch_id(training_rollout_id(group_id, index), branch)
            yield f"rollout {name} has a segment from token {start} on, where others end"
        ends[group_id, index, branch] = start + tokens
        sampled[group_id, index] += tokens if version != CONTEXT else 0
    for group_id, index, tokens in connection.execute("SELECT group_id, rollout_index, tokens FROM rollouts"):
        if tokens != sampled.pop((group_id, index), 0):
            yield f"rollout {group_id}-{index} has other segments than its {tokens} tokens"
    yield from (f"rollout {group_id}-{index} has segments, and no row" for group_id, index in sampled)


def _batch(connection: sqlite3.Connection, batch: TrainingBatch, settings: BufferSettings) -> Iterator[str]:
    step = batch.step
    (digest,) = connection.execute("SELECT digest FROM batches WHERE step = ?", (step,)).fetchone()
    if digest != batch_digest(batch):
        yield f"step {step} trained on other tokens than are recorded"
    if len(batch.groups) != settings.groups_per_step:
        yield f"step {step} has {len(batch.groups)} groups"
    if batch.version != step // settings.publish_every:
        yield f"step {step} was taken at version {batch.version}"
    if (staleness := max(batch.staleness, default=0)) > settings.max_staleness:
        yield f"step {step} has a group of staleness {staleness}"
    for group in batch.groups:
        yield from _group(step, batch.version, group, settings)


def _group(step: int, version: int, group: Any, settings: BufferSettings) -> Iterator[str]:
    name = f"step {step}, group {group.group_id}"
    if len(group.rollouts) != settings.group_size:
        yield f"{name}: {len(group.rollouts)} rollouts"
    for rollout in group.rollouts:
        if rollout.finish_reason is None:
            yield f"{name}: an unfinished rollout"
        for sequence in rollout.sequences:
            lengths = {len(sequence.ids), len(sequence.logprobs), len(sequence.versions)}
            # A rollout with prompt ids is not an episode: all its other tokens were sampled.
            versions = sequence.versions if rollout.prompt_ids else sequence.versions[sequence.sampled]
            if len(lengths) > 1:
                yield f"{name}: tokens, log-probs and versions of different lengths"
            elif np.any(np.diff(versions) < 0):
                yield f"{name}: decreasing versions"
            elif len(versions) and not group.version <= versions[0] <= versions[-1] <= version:
                yield f"{name}: tokens of versions {versions[0]} to {versions[-1]}"
