"""The dashboard of a run, drawn by `asyncrl watch` and `asyncrl train` from the same numbers.

Invariant: a look costs the same for a run of any length. It reads the newest steps, the buffer, the evaluations and the
newest faults, each by an index, and never scans groups or rollouts. Texts from a run are never read as rich markup or
as terminal control characters.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from asyncrl_cli.core.terminal import plain_text
from asyncrl_cli.inspect.pages import duration, moment
from asyncrl_cli.journal.events import metrics_of
from asyncrl_cli.journal.history import evaluations, failures, newest_batch, newest_health, newest_steps
from asyncrl_cli.journal.progress import progress
from asyncrl_cli.journal.queries import Due, due_groups, snapshot
from asyncrl_cli.journal.schema import FILE, JournalError
from asyncrl_cli.records.groups import Counts
from asyncrl_cli.runs.directory import ACTIVE, RunDirectory, engines_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

TREND_STEPS = 200
"""Largest number of values in a sparkline. The terminal's width decides how many of them are shown."""
METRIC_ROWS: Mapping[str, tuple[str, str]] = {
    "reward/mean": ("reward", "{:.3f}"),
    "response/tokens_mean": ("response", "{:.1f} tokens"),
    "train/loss": ("loss", "{:+.3f}"),
    "correction/logprob_gap_mean": ("log-prob gap", "{:.3g} nats"),
}
"""Labels and formats of metrics with a sparkline."""
TRENDS = (*METRIC_ROWS, "staleness/groups_mean")
BARS = "▁▂▃▄▅▆▇█"
FINISHED, RUNNING = "█", "░"
"""The signs for groups in the picture of the buffer."""
PICTURE_WIDTH = 32
DUE_ROWS = 6
FAULTS = 3
LABEL_WIDTH = len("held-out, sampled")
GAP = 2
"""Columns between a label, a value and a sparkline."""


@dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment. Empty or None: not known."""

    activity: str
    step: int = 0
    steps: int = 0
    version: int = 0
    max_staleness: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the newest step."""
    trends: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The last values of each metric in ``TRENDS``."""
    accuracy: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Held-out accuracies by kind of evaluation, oldest first."""
    remaining_s: float | None = None
    """Seconds until the last step."""
    trainer: str = ""
    """The trainer's activity."""
    engines: str = ""
    """Number of engines that serve."""
    counts: Counts | None = None
    due: Sequence[Due] = ()
    """Groups that are not in a batch yet, by deadline."""
    faults: Sequence[str] = ()
    """The newest faults, one line each."""
    findings: Sequence[str] = ()
    """The findings of the run's health that last."""


def look(run: RunDirectory, unix_time: float | None = None) -> RunView:
    """Return the state of the run at the Unix time, now by default."""
    phase, state = run.status, run.state
    reason = f": {state.reason}" if state.reason and phase not in ACTIVE else ""
    activity = f"{run.run_id}, {phase}{reason}"
    try:
        with snapshot(run.path / FILE) as connection:
            view = _view(connection, phase in ACTIVE, time.time() if unix_time is None else unix_time)
            findings = [newest_health(connection, rule) for rule in state.findings]
    except JournalError as error:
        return RunView(activity if not (run.path / FILE).exists() else f"{activity}; {error}", steps=state.steps)
    engines = engines_text(state) if phase in ACTIVE else ""
    return replace(view, activity=activity, findings=findings, engines=engines)


def _view(connection: sqlite3.Connection, is_active: bool, unix_time: float) -> RunView:
    position = progress(connection)
    steps = newest_steps(connection, TREND_STEPS)
    recent_metrics = [metrics_of(step.metrics) for step in steps]
    metrics = recent_metrics[-1] if recent_metrics else {}
    accuracy: dict[str, list[float]] = {}
    for evaluation in sorted(evaluations(connection), key=lambda evaluation: evaluation.kind):
        accuracy.setdefault(evaluation.kind, []).append(evaluation.accuracy)
    due, total_steps = due_groups(connection, position), position.settings.total_steps
    completed = steps[-1].step if steps else position.first_step
    remaining_s = None
    if is_active and len(steps) > 1:
        # The median, because the run may have been down between two steps.
        step_s = median((later.at - earlier.at) / (later.step - earlier.step) for earlier, later in pairwise(steps))
        remaining_s = step_s * (total_steps - completed)
    # These counts come from the newest step's metrics: counting here would scan all groups.
    counts = {name: int(metrics.get(f"buffer/groups_{name}", 0)) for name in ("taken", "rejected", "requeued", "late")}
    return RunView(
        activity="",
        step=completed,
        steps=total_steps,
        version=position.version,
        max_staleness=position.settings.max_staleness,
        metrics=metrics,
        trends={name: [values[name] for values in recent_metrics if name in values] for name in TRENDS},
        accuracy=accuracy,
        remaining_s=remaining_s,
        trainer=_trainer(connection, total_steps, unix_time) if is_active else "",
        counts=Counts(
            running=sum(groups.running for groups in due), finished=sum(groups.finished for groups in due), **counts
        ),
        due=due,
        faults=[f"{moment(fault.at)} {fault.part}: {fault.message}" for fault in failures(connection, FAULTS)[::-1]],
    )


def _trainer(connection: sqlite3.Connection, steps: int, unix_time: float) -> str:
    newest = newest_batch(connection)
    if newest is None:
        return ""
    step, taken_at, trained_at = newest
    if trained_at is None:
        return f"trains step {step + 1} for {duration(max(0.0, unix_time - taken_at))}"
    if step + 1 == steps:
        return ""
    return f"waits for the batch of step {step + 2} for {duration(max(0.0, unix_time - trained_at))}"


# -- the panel


def sparkline(values: Sequence[float]) -> str:
    """Draw one bar per value, scaled from the lowest value to the highest; a space for NaN and infinity."""
    finite = [value for value in values if math.isfinite(value)]
    lowest = min(finite, default=0.0)
    span = max(finite, default=0.0) - lowest
    is_flat = not 0.0 < span < math.inf
    heights = {value: 0 if is_flat else int((value - lowest) / span * (len(BARS) - 1)) for value in finite}
    return "".join(BARS[heights[value]] if math.isfinite(value) else " " for value in values)


def picture(due: Due, groups_per_cell: int) -> str:
    """Draw the groups of one deadline: finished groups, then running groups. Counts are rounded up to hide no group."""
    finished_cells, running_cells = (-(-count // groups_per_cell) for count in (due.finished, due.running))
    return FINISHED * finished_cells + RUNNING * running_cells


class Sparkline(NamedTuple):
    """A row with a sparkline: its label, the newest value as text, and the last values."""

    label: str
    text: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """The panel for rich, with sparklines as long as the terminal allows. Rows without data are omitted."""

    view: RunView

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        view = self.view

        def line(text: str, wraps: bool = False) -> Text:
            cell = plain_text(text.replace("\n", r"\n"))
            cell.no_wrap, cell.overflow = not wraps, "fold" if wraps else "ellipsis"
            return cell

        table = Table.grid(padding=(0, GAP))
        # rich first shrinks columns without a fixed width, so the labels survive a long line.
        table.add_column(style="dim", width=LABEL_WIDTH)
        table.add_column()
        table.add_row("now", line(view.activity))
        if view.metrics:
            remaining = "" if view.remaining_s is None else f", {duration(view.remaining_s)} left"
            table.add_row("step", line(f"{view.step} of {view.steps}, weight version {view.version}{remaining}"))
            table.add_row("", ProgressBar(total=view.steps, completed=view.step, width=40))
        for index, finding in enumerate(view.findings):
            table.add_row("" if index else "NOT HEALTHY", line(finding, wraps=True))
        if view.metrics:
            trends = list(_trends(view))
            text_width = max((len(trend.text) for trend in trends), default=0)
            columns = max(0, options.max_width - LABEL_WIDTH - text_width - 2 * GAP)
            for trend in trends:
                bars = sparkline(trend.values[-columns:] if columns else ())
                table.add_row(line(trend.label), line(f"{trend.text:{text_width + GAP}}{bars}".rstrip()))
            for label, text in _speed(view):
                table.add_row(label, line(text))
        for label, text in _buffer(view):
            table.add_row(label, line(text))
        for index, fault in enumerate(view.faults[-FAULTS:]):
            table.add_row("" if index else "last faults", line(" ".join(fault.split())))
        yield table


def _trends(view: RunView) -> Iterator[Sparkline]:
    """Any metric may be missing in a run of another version of asyncrl."""
    metrics = view.metrics
    for index, (name, (label, form)) in enumerate(METRIC_ROWS.items()):
        if name in metrics:
            yield Sparkline(label, form.format(metrics[name]), view.trends.get(name, ()))
        if index == 0:
            for series, values in view.accuracy.items():
                series_label = series if ":" in series else f"held-out, {series}"
                yield Sparkline(series_label, f"{values[-1]:.3f}, first {values[0]:.3f}", values)
    if "staleness/groups_mean" in metrics and "staleness/groups_max" in metrics:
        mean, maximum = metrics["staleness/groups_mean"], metrics["staleness/groups_max"]
        bound = f"{mean:.2f}, max {maximum:.0f} of {view.max_staleness} versions"
        yield Sparkline("staleness", bound, view.trends.get("staleness/groups_mean", ()))


def _speed(view: RunView) -> Iterator[tuple[str, str]]:
    metrics = view.metrics
    if "tokens/generated_per_s" in metrics:
        yield "generated", f"{metrics['tokens/generated_per_s']:,.0f} tokens/s"

    def shares(names: Mapping[str, str]) -> list[str]:
        return [f"{label} {metrics[name]:.0%}" for label, name in names.items() if name in metrics]

    if trainer := [*shares({"busy": "share/trainer_busy", "MFU": "mfu/end_to_end"}), *filter(None, [view.trainer])]:
        yield "trainer", ", ".join(trainer)
    engine_shares = shares({"busy": "share/engines_busy", "paused": "share/engines_paused"})
    if engines := [*filter(None, [view.engines]), *engine_shares]:
        yield "engines", ", ".join(engines)


def _buffer(view: RunView) -> Iterator[tuple[str, str]]:
    if view.counts is not None and (view.metrics or view.due):
        counts = view.counts
        waiting = f"{RUNNING} {counts.running} running, {FINISHED} {counts.finished} finished"
        yield "groups", f"{waiting}, {counts.taken} trained, {counts.rejected} rejected"
    largest = max((due.finished + due.running for due in view.due), default=0)
    per_cell = max(1, -(-largest // PICTURE_WIDTH))
    for index, due in enumerate(view.due[:DUE_ROWS]):
        label = "" if index else "to be trained"
        yield label, f"by version {due.deadline}  {picture(due, per_cell)}  {due.finished} + {due.running}"
    if later := view.due[DUE_ROWS:]:
        yield "", f"and {sum(due.finished + due.running for due in later)} groups with later deadlines"
