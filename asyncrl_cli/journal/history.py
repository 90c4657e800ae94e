"""A run's history, read from its journal: starts, failures, work, checkpoints, evaluations, steps and requests.

Steps and batches count from 0 here. Times are unix seconds.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl_cli.journal.events import HEALTH, metrics_of
from asyncrl_cli.journal.progress import Progress, base, progress
from asyncrl_cli.journal.rollout_rows import REQUEST_COLUMNS
from asyncrl_cli.records.generation import EVALUATION, EngineRequest

SHARES = ("share/trainer_busy", "share/engines_busy", "share/engines_paused")
"""Metrics about idle time (docs/metrics.md)."""
NEWEST_FAILURES = 10
"""Number of failures listed individually."""


@dataclass(frozen=True, slots=True)
class Start:
    """A process began to write the journal: ``train`` or ``resume``."""

    at: float
    process: str
    host: str
    pid: int
    steps_taken: int
    version: int
    note: str


@dataclass(frozen=True, slots=True)
class Fault:
    """A part failed or waited for long; the run may have continued."""

    at: float
    kind: str
    part: str
    message: str


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A complete checkpoint. It took ``seconds``, and stopped training for ``stall_s``. ``removed_at`` is None while it
    exists; `checkpoints.upload` copied it at ``uploaded_at``, or failed with ``upload_failure``."""

    at: float
    after_step: int
    folder: str
    seconds: float
    stall_s: float
    removed_at: float | None
    uploaded_at: float | None
    upload_failure: str


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """An evaluation; weight versions ``oldest`` to ``newest`` sampled its tokens."""

    at: float
    after_step: int
    kind: str
    accuracy: float
    mean_reward: float
    mean_length: float
    prompts: int
    oldest: int
    newest: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals over the trained steps, from their metrics.

    Args:
        steps: number of trained steps.
        seconds: sum of the steps' times, without the time between two starts of the run.
        trained_tokens, generated_tokens: defined in docs/metrics.md.
        shares: means of ``SHARES``, weighted by the steps' times.
    """

    steps: int
    seconds: float
    trained_tokens: int
    generated_tokens: int
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class History:
    """A run's rows, oldest first. ``failures`` has the newest failures (including stalls), and
    ``failures_by_kind`` counts all."""

    progress: Progress
    starts: tuple[Start, ...]
    failures: tuple[Fault, ...]
    failures_by_kind: Mapping[str, int]
    work: Totals
    checkpoints: tuple[CheckpointRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]


def history(connection: sqlite3.Connection) -> History:
    counts = connection.execute(
        "SELECT kind, count(*) FROM failures WHERE kind != ? GROUP BY kind ORDER BY count(*) DESC", (HEALTH,)
    )
    return History(
        progress=progress(connection),
        starts=starts(connection),
        failures=failures(connection, NEWEST_FAILURES)[::-1],
        failures_by_kind=dict(counts.fetchall()),
        work=_totals(connection),
        checkpoints=checkpoints(connection),
        evaluations=evaluations(connection),
    )


def starts(connection: sqlite3.Connection) -> tuple[Start, ...]:
    rows = connection.execute("SELECT at, kind, host, pid, step, version, note FROM starts ORDER BY id")
    return tuple(Start(*row) for row in rows)


def first_start(connection: sqlite3.Connection) -> float:
    """Return the run's beginning; 0 without one."""
    return float(connection.execute("SELECT coalesce(min(at), 0) FROM starts").fetchone()[0])


def checkpoints(connection: sqlite3.Connection) -> tuple[CheckpointRecord, ...]:
    """Return all recorded checkpoints by time, including removed ones."""
    rows = connection.execute(
        "SELECT at, step, folder, seconds, stall_s, removed_at, uploaded_at, upload_failure FROM checkpoints "
        "ORDER BY at"
    )
    return tuple(CheckpointRecord(*row) for row in rows)


def evaluations(connection: sqlite3.Connection) -> tuple[EvaluationRecord, ...]:
    """Return all evaluations, sorted by step and kind."""
    rows = connection.execute(
        "SELECT at, step, kind, accuracy, mean_reward, mean_length, prompts, oldest, newest FROM evaluations "
        "ORDER BY step, kind"
    )
    return tuple(EvaluationRecord(*row) for row in rows)


def greedy_accuracies(connection: sqlite3.Connection) -> dict[int, float]:
    """Return the greedy held-out accuracies, by step. A checkpoint keeps those from before the journal begins."""
    earlier_accuracies = base(connection).get("evaluated", {})
    recorded = connection.execute("SELECT step, accuracy FROM evaluations WHERE kind = 'greedy'")
    return {int(step): accuracy for step, accuracy in earlier_accuracies.items()} | dict(recorded)


def failures(connection: sqlite3.Connection, count: int, newest_first: bool = True) -> tuple[Fault, ...]:
    """Return the newest failures, newest first, or else the first failures; both include stalls."""
    order = "DESC" if newest_first else "ASC"
    rows = connection.execute(
        f"SELECT at, kind, part, message FROM failures WHERE kind != ? ORDER BY id {order} LIMIT ?", (HEALTH, count)
    )
    return tuple(Fault(*row) for row in rows)


def newest_health(connection: sqlite3.Connection, rule: str) -> str:
    """Return the newest message of a rule of health; the rule if there is none."""
    row = connection.execute(
        "SELECT message FROM failures WHERE kind = ? AND part = ? ORDER BY id DESC LIMIT 1", (HEALTH, rule)
    ).fetchone()
    return str(row[0]) if row else rule


# -- steps


class TrainedStep(NamedTuple):
    """A trained step (from 1), the time of its report, and its metrics as JSON."""

    at: float
    step: int
    metrics: str | None


class PublishSpan(NamedTuple):
    """A published version, from the trainer's first tensor to the last engine's proof; ``stall_s`` is the longest
    pause of an engine."""

    version: int
    started_at: float
    finished_at: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One trained batch, and the publish after it if one was due.

    Invariant: a step's spans do not overlap and come in the order waiting, training, publishing, so they add up. If
    two processes' clocks put times slightly out of order, ``step_spans`` moves them into order.
    """

    step: int
    version: int
    batch_taken_at: float
    trained_until: float
    reported_at: float
    publish: PublishSpan | None
    metrics: Mapping[str, float]

    @property
    def free_at(self) -> float:
        """Time when the trainer was free for the next batch; engines may have loaded the version later."""
        return self.trained_until + self.metrics.get("time/publish_s", 0.0)


def newest_steps(connection: sqlite3.Connection, count: int) -> list[TrainedStep]:
    """Return the newest trained steps, oldest first."""
    rows = connection.execute(
        "SELECT trained_at, step + 1, metrics FROM batches WHERE trained_at IS NOT NULL ORDER BY step DESC LIMIT ?",
        (count,),
    )
    return [TrainedStep(*row) for row in rows.fetchall()[::-1]]


def newest_batch(connection: sqlite3.Connection) -> tuple[int, float, float | None] | None:
    """Return the newest batch's step, and the times when it was taken and trained; None without a batch."""
    batch: tuple[int, float, float | None] | None = connection.execute(
        "SELECT step, taken_at, trained_at FROM batches ORDER BY step DESC LIMIT 1"
    ).fetchone()
    return batch


def step_metrics(connection: sqlite3.Connection, step: int) -> dict[str, float]:
    """Return a step's metrics; empty if they are not recorded."""
    row = connection.execute("SELECT metrics FROM batches WHERE step = ?", (step,)).fetchone()
    return metrics_of(row[0]) if row else {}


def metrics_rows(connection: sqlite3.Connection) -> Iterator[dict[str, float]]:
    """Yield the rows of metrics.jsonl (steps from 1) for all steps with recorded metrics."""
    for step, version, at, metrics in connection.execute(
        "SELECT step + 1, (step + 1) / (SELECT value ->> 'publish_every' FROM meta WHERE key = 'settings'), "
        "trained_at, metrics FROM batches WHERE metrics IS NOT NULL"
    ):
        yield {"step": step, "version": version, "time": at, **metrics_of(metrics)}


def _totals(connection: sqlite3.Connection) -> Totals:
    sums: defaultdict[str, float] = defaultdict(float)
    step_count = 0
    for metrics in metrics_rows(connection):
        seconds = metrics.get("time/step_s", 0.0)
        step_count += 1
        for name in ("time/step_s", "tokens/trained", "tokens/generated"):
            sums[name] += metrics.get(name, 0.0)
        for name in SHARES:
            sums[name] += metrics.get(name, 0.0) * seconds
    total_s = sums["time/step_s"]
    return Totals(
        steps=step_count,
        seconds=total_s,
        trained_tokens=int(sums["tokens/trained"]),
        generated_tokens=int(sums["tokens/generated"]),
        shares={name: sums[name] / total_s for name in SHARES} if total_s else {},
    )


def first_publish(connection: sqlite3.Connection) -> PublishSpan | None:
    """Return the publish of the run's initial weights, before this journal's first step."""
    row = connection.execute(
        "SELECT version, at - seconds, at, stall_s FROM publishes "
        "WHERE step <= (SELECT coalesce(min(step), 0) FROM batches) ORDER BY version LIMIT 1"
    ).fetchone()
    return PublishSpan(*row) if row else None


def step_spans(connection: sqlite3.Connection, publish_every: int) -> Iterator[StepSpan]:
    """Yield the trained steps in order."""
    rows = connection.execute(
        "SELECT b.step, b.version, b.taken_at, b.trained_at, b.metrics, p.version, p.at, p.seconds, p.stall_s "
        "FROM batches b LEFT JOIN publishes p "
        "ON p.version = (b.step + 1) / :every AND (b.step + 1) % :every = 0 "
        "WHERE b.trained_at IS NOT NULL ORDER BY b.step",
        {"every": publish_every},
    )
    for step, version, batch_taken_at, reported_at, text, published_version, published_at, seconds, stall_s in rows:
        metrics = metrics_of(text)
        train_s = max(0.0, reported_at - batch_taken_at - (seconds or 0.0))
        trained_until = batch_taken_at + metrics.get("time/train_s", train_s)
        publish = None
        if published_version is not None:
            finished_at = max(published_at, trained_until)
            started_at = min(max(published_at - seconds, trained_until), finished_at)
            publish = PublishSpan(published_version, started_at, finished_at, stall_s)
        yield StepSpan(
            step,
            version=version,
            batch_taken_at=batch_taken_at,
            trained_until=trained_until,
            reported_at=reported_at,
            publish=publish,
            metrics=metrics,
        )


# -- groups and rollouts


class GroupSpan(NamedTuple):
    """A group's life; ``finished_at`` is None while it runs."""

    group_id: int
    step: int | None
    admitted_at: float
    finished_at: float | None


class RolloutTimes(NamedTuple):
    """A recorded rollout and its group's state."""

    group_id: int
    rollout_index: int
    state: str
    step: int | None
    prompt_tokens: int
    admitted_at: float
    recorded_at: float
    tokens: int


def reported_metrics(connection: sqlite3.Connection) -> set[str] | None:
    """Return the names of the task's metrics in rollouts with a reward; None if there is no such rollout."""
    texts = connection.execute("SELECT DISTINCT metrics FROM rollouts WHERE reward IS NOT NULL").fetchall()
    return {name for (text,) in texts for name in metrics_of(text)} if texts else None


def last_scores(connection: sqlite3.Connection) -> dict[int, float | None]:
    """Return, by step, the time when its batch's last group was scored."""
    return dict(connection.execute("SELECT step, max(ended_at) FROM groups WHERE step IS NOT NULL GROUP BY step"))


def group_spans(connection: sqlite3.Connection, first_id: int) -> Iterator[GroupSpan]:
    """Yield the lives of all groups from ``first_id`` on."""
    rows = connection.execute(
        "SELECT id, step, admitted_at, ended_at FROM groups WHERE id >= ? ORDER BY id", (first_id,)
    )
    return map(GroupSpan._make, rows)


def rollout_times(connection: sqlite3.Connection, first_id: int) -> Iterator[RolloutTimes]:
    """Yield the rollouts of all groups from ``first_id`` on, in admission order."""
    rows = connection.execute(
        "SELECT g.id, r.rollout_index, g.state, g.step, length(g.prompt_ids) / 4, g.admitted_at, r.recorded_at, "
        "r.tokens FROM groups g JOIN rollouts r ON r.group_id = g.id WHERE g.id >= ? ORDER BY g.id, r.rollout_index",
        (first_id,),
    )
    return map(RolloutTimes._make, rows)


def first_group(connection: sqlite3.Connection, step: int) -> int:
    """Return a batch's lowest group; 0 without one."""
    row = connection.execute("SELECT min(id) FROM groups WHERE step = ?", (step,)).fetchone()
    return int(row[0] or 0)


def staleness_of(connection: sqlite3.Connection, versions: Mapping[int, int]) -> Counter[int]:
    """Count the groups of steps by staleness; ``versions`` maps each step to the version that it was trained at."""
    ages: Counter[int] = Counter()
    for step, version in versions.items():
        ages.update(
            version - admitted
            for (admitted,) in connection.execute("SELECT version FROM groups WHERE step = ?", (step,))
        )
    return ages


# -- engines


def engine_requests(connection: sqlite3.Connection, since: float = 0.0) -> Iterator[EngineRequest]:
    """Yield the requests that ended after ``since``, in the order they began."""
    rows = connection.execute(
        f"SELECT {REQUEST_COLUMNS} FROM engine_requests WHERE ended_at > ? ORDER BY begun_at", (since,)
    )
    return (EngineRequest(*row) for row in rows)


def evaluation_spans(connection: sqlite3.Connection) -> list[tuple[float, float]]:
    """Return begin and end of every request in an evaluation."""
    return connection.execute(
        f"SELECT begun_at, ended_at FROM engine_requests WHERE request GLOB '{EVALUATION}*' ORDER BY begun_at"
    ).fetchall()


def pauses_since(connection: sqlite3.Connection, since: float) -> dict[str, list[tuple[float, float]]]:
    """Return, by engine, begin and end of its pauses for new weights, in order of time."""
    pauses: dict[str, list[tuple[float, float]]] = {}
    for (text,) in connection.execute("SELECT pauses FROM publishes WHERE at > ? ORDER BY at", (since,)):
        for engine, (begin, end) in json.loads(text).items():
            if end > begin:
                pauses.setdefault(engine, []).append((begin, end))
    return pauses
