"""Query the buffer's contents in the journal of a live run, a dead run or a copy.

All queries in one ``snapshot`` see the same moment. A journal with a million rollouts must answer within a second, so
queries do not read tokens or the entire history. The exceptions are one group's page, and a filter that most groups
fail. Steps count from 1 here, as in metrics.jsonl.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal, get_args

from asyncrl_cli.journal.progress import DROPPED, OUTSTANDING, Progress, dropped_groups, progress
from asyncrl_cli.journal.rollout_rows import joined, read_group, read_rollouts, read_tokens
from asyncrl_cli.journal.schema import JournalError, reading
from asyncrl_cli.records.generation import Segment, branch_id, training_rollout_id
from asyncrl_cli.records.images import PlacedImage
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import Turn

GroupState = Literal["running", "finished", "taken", "trained", "rejected", "requeued"]
"""``taken``: in a batch that is not trained yet. The journal's state ``taken`` also includes ``trained``."""
STATES: tuple[GroupState, ...] = get_args(GroupState)

LARGEST = 2**63 - 1
"""SQLite's largest integer."""

_OUTSTANDING, _DROPPED = f"g.{OUTSTANDING}", f"g.{DROPPED}"
_WHERE: dict[GroupState, str] = {
    "running": f"{_OUTSTANDING} AND g.state = 'running'",
    "finished": f"{_OUTSTANDING} AND g.state = 'finished'",
    "taken": "g.step IN (SELECT step FROM batches WHERE trained_at IS NULL)",
    "trained": "g.step IS NOT NULL AND g.step IN (SELECT step FROM batches WHERE trained_at IS NOT NULL)",
    "rejected": f"{_DROPPED} AND g.state = 'rejected'",
    "requeued": f"{_DROPPED} AND g.state = 'requeued'",
}


@contextmanager
def snapshot(path: Path) -> Iterator[sqlite3.Connection]:
    """Connect such that all queries see the journal's state at this moment.

    Raises ``JournalError``, also if nothing was ever committed.
    """
    with reading(path) as connection:
        connection.execute("BEGIN")
        if not connection.execute("SELECT 1 FROM meta WHERE key = 'settings'").fetchone():
            raise JournalError(
                "the journal is empty", location=str(path), hint="wait until the run has started its first group"
            )
        yield connection


# -- the whole buffer


@dataclass(frozen=True, slots=True)
class StateCount:
    """The groups in one state, with their ended rollouts and the sampled tokens recorded so far. A value is None if it
    would need a pass through the history.

    ``age_s`` and ``oldest_s`` are the median and the highest age in seconds: since admission (running), since the last
    rollout ended (finished), since the batch was taken (taken).
    """

    state: GroupState
    groups: int
    rollouts: int | None = None
    tokens: int | None = None
    age_s: float | None = None
    oldest_s: float | None = None


@dataclass(frozen=True, slots=True)
class Due:
    """Groups admitted at one version and not taken yet. ``staleness`` is their staleness if they were taken now,
    ``deadline`` the last version at which they may be taken."""

    version: int
    staleness: int
    deadline: int
    running: int
    finished: int


@dataclass(frozen=True, slots=True)
class Overview:
    """The buffer at the unix time ``at``. ``rejected`` counts groups by reason; ``due`` starts with the oldest
    version."""

    at: float
    progress: Progress
    states: tuple[StateCount, ...]
    rejected: dict[str, int]
    due: tuple[Due, ...]


def overview(connection: sqlite3.Connection, time_s: float | None = None) -> Overview:
    """Summarize the buffer for one screen."""
    now_s = time.time() if time_s is None else time_s
    run_progress = progress(connection)
    dropped = dropped_groups(connection)
    # All taken groups minus the few untrained groups: both counts are fast, unlike a count by step.
    taken_or_trained, untrained = (
        connection.execute(f"SELECT count(*) FROM groups g WHERE {condition}").fetchone()[0]
        for condition in ("g.step IS NOT NULL", _WHERE["taken"])
    )
    return Overview(
        at=now_s,
        progress=run_progress,
        states=(
            _present(connection, "running", "g.admitted_at", now_s),
            _present(connection, "finished", "g.ended_at", now_s),
            _present(connection, "taken", "(SELECT taken_at FROM batches b WHERE b.step = g.step)", now_s),
            StateCount("trained", taken_or_trained - untrained),
            StateCount("rejected", sum(dropped["rejected"].values())),
            StateCount("requeued", sum(dropped["requeued"].values())),
        ),
        rejected=dropped["rejected"],
        due=due_groups(connection, run_progress),
    )


def _present(connection: sqlite3.Connection, state: GroupState, since: str, now_s: float) -> StateCount:
    """Count a state that only few groups have at a time."""
    rows = connection.execute(f"SELECT {since} FROM groups g WHERE {_WHERE[state]}")
    ages = [now_s - since_s for (since_s,) in rows]
    if not ages:
        return StateCount(state, groups=0, rollouts=0, tokens=0)
    rollouts, tokens = connection.execute(
        f"SELECT count(r.finish_reason), coalesce(sum(r.tokens), 0) FROM groups g "
        f"JOIN rollouts r ON r.group_id = g.id WHERE {_WHERE[state]}"
    ).fetchone()
    return StateCount(state, len(ages), rollouts, tokens, age_s=median(ages), oldest_s=max(ages))


def due_groups(connection: sqlite3.Connection, run_progress: Progress) -> tuple[Due, ...]:
    """Count the groups that are not taken by version of admission, oldest first."""
    rows = connection.execute(
        f"SELECT g.version, sum(g.state = 'running'), sum(g.state = 'finished') FROM groups g "
        f"WHERE {_OUTSTANDING} GROUP BY g.version ORDER BY g.version"
    )
    bound = run_progress.settings.max_staleness
    return tuple(Due(version, run_progress.version - version, version + bound, *counts) for version, *counts in rows)


# -- lists of groups


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group, without its texts.

    Args:
        reason: why it was rejected.
        version: weight version at admission.
        staleness: the group's staleness when it was taken, or if it were taken now; None for a dropped group.
        step: step of its batch.
        rollouts, tokens: number of ended rollouts and of recorded sampled tokens.
        reward: mean over the scored rollouts.
        admitted_at, ended_at: unix times.
    """

    group_id: int
    uid: str
    state: GroupState
    reason: str
    version: int
    staleness: int | None
    step: int | None
    rollouts: int
    tokens: int
    reward: float | None
    admitted_at: float
    ended_at: float | None


_GROUP = f"""
    SELECT g.id, g.uid, CASE WHEN g.state = 'taken' AND b.trained_at IS NOT NULL THEN 'trained' ELSE g.state END,
           g.reason, g.version, CASE WHEN {_OUTSTANDING} THEN :version ELSE b.version END - g.version, g.step + 1,
           (SELECT count(finish_reason) FROM rollouts r WHERE r.group_id = g.id),
           (SELECT coalesce(sum(tokens), 0) FROM rollouts r WHERE r.group_id = g.id),
           (SELECT avg(reward) FROM rollouts r WHERE r.group_id = g.id), g.admitted_at, g.ended_at
    FROM groups g LEFT JOIN batches b ON b.step = g.step
"""


def list_groups(connection: sqlite3.Connection, state: GroupState | None, limit: int) -> list[GroupRow]:
    """Return the newest groups in a state, or in any state, newest first."""
    rows = connection.execute(
        # Select the ids first: otherwise SQLite computes the columns of all groups in the state.
        f"{_GROUP} WHERE g.id IN (SELECT g.id FROM groups g WHERE {_WHERE[state] if state else '1'} "
        "ORDER BY g.id DESC LIMIT :limit) ORDER BY g.id DESC",
        {"version": progress(connection).version, "limit": min(limit, LARGEST)},
    )
    return [GroupRow(*row) for row in rows]


# -- one group with its rollouts


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """Everything recorded about one rollout.

    ``tokens`` counts sampled tokens; ``finish_reason`` is None while it runs; ``metrics`` are the task's measurements;
    ``masked`` means that the task cannot score it. ``segments`` come one sequence after another (``rollout_id`` names
    the sequence), split where the version changes; there are none if the tokens were dropped (``journal.keep``).
    ``images`` are the images after the prompt, in all sequences.
    """

    rollout_id: str
    tokens: int
    finish_reason: str | None
    reward: float | None
    failure: str | None
    masked: bool
    metrics: Mapping[str, float]
    recorded_at: float
    turns: tuple[Turn, ...]
    segments: tuple[Segment, ...]
    images: tuple[PlacedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One group with its prompt and its rollouts, by index."""

    row: GroupRow
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    rollouts: tuple[RolloutRecord, ...]
    images: tuple[PlacedImage, ...] = ()
    """The prompt's images, if the prompt has tokens."""


def group_record(connection: sqlite3.Connection, group_id: int) -> GroupRecord:
    """Return everything about one group. Raises ``LookupError`` if there is no such group."""
    parameters = {"version": progress(connection).version, "id": min(group_id, LARGEST)}
    row = connection.execute(f"{_GROUP} WHERE g.id = :id", parameters).fetchone()
    if row is None:
        raise LookupError(f"there is no group {group_id}")
    group = read_group(connection, group_id)
    tokens = read_tokens(connection, group_id)
    rollouts = [
        RolloutRecord(
            rollout_id=training_rollout_id(group_id, index),
            tokens=rollout.tokens,
            finish_reason=rollout.finish_reason,
            reward=rollout.reward,
            failure=rollout.failure,
            masked=bool(rollout.masked),
            metrics=rollout.decoded_metrics(),
            recorded_at=rollout.recorded_at,
            turns=rollout.rewarded_turns(),
            segments=tuple(
                segment
                for branch, sequence in joined(tokens.segments.get(index, {})).items()
                for segment in sequence.segments(branch_id(training_rollout_id(group_id, index), branch))
            ),
            images=tuple(image for (owner, _), images in tokens.images.items() if owner == index for image in images),
        )
        for index, rollout in read_rollouts(connection, group_id).items()
    ]
    return GroupRecord(
        GroupRow(*row), prompt=group.prompt, prompt_ids=group.prompt_ids, rollouts=tuple(rollouts), images=group.images
    )
