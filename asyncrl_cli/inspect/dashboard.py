"""The panel that shows a run on a terminal: the live view of `asyncrl train` and `asyncrl watch`.

It shows plain data (``Shown``) and omits rows without data. Texts from a run are never read as rich markup or as
terminal control characters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asyncrl_cli.core.terminal import plain_text
from asyncrl_cli.inspect.pages import duration
from asyncrl_cli.journal.queries import Due
from asyncrl_cli.records.groups import Counts

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

TREND_STEPS = 200
"""Largest number of values in a sparkline. The terminal's width decides how many of them are shown."""
MOST_TREND_ROWS = 3
"""Largest height of a sparkline in lines, on a terminal with room for it."""
TALL = 30
"""Lines of a terminal from which the panel shows all of ``METRIC_ROWS``."""
METRIC_ROWS: Mapping[str, tuple[str, str]] = {
    "reward/mean": ("reward", "{:.3f}"),
    "response/tokens_mean": ("response", "{:.1f} tokens"),
    "train/loss": ("loss", "{:+.3f}"),
    "correction/logprob_gap_mean": ("log-prob gap", "{:.3g} nats"),
    "reward/uniform_groups": ("equal groups", "{:.0%}"),
    "response/truncated_ratio": ("truncated", "{:.1%}"),
    "correction/kl_behaviour": ("KL to the sampler", "{:.2g} nats"),
    "train/entropy": ("entropy", "{:.3g} nats"),
    "train/gradient_norm": ("gradient norm", "{:.3g}"),
}
"""Labels and formats of metrics with a sparkline."""
SHORT_ROWS = 4
"""Number of ``METRIC_ROWS`` on a terminal that is not ``TALL``."""
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
class Shown:
    """A run at one moment. Empty or None: not known."""

    now: str
    """The run's activity."""
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
    due: Sequence[Due] | None = None
    """Groups that are not in a batch yet, by deadline."""
    faults: Sequence[str] = ()
    """The newest faults, one line each."""
    findings: Sequence[str] = ()
    """The findings of the run's health that last."""


def sparkline(values: Sequence[float], rows: int = 1) -> list[str]:
    """Draw one bar per value, scaled from the lowest value to the highest, as lines from top to bottom."""
    low, span = (min(values), max(values) - min(values)) if values else (0.0, 0.0)
    levels = [0] * len(values)
    if 0.0 < span < math.inf:
        levels = [int((value - low) / span * (rows * len(BARS) - 1)) for value in values]
    bars = f" {BARS}"
    tops = [(rows - 1 - row) * len(BARS) for row in range(rows)]
    return ["".join(bars[min(max(level + 1 - top, 0), len(BARS))] for level in levels) for top in tops]


def picture(due: Due, groups_per_cell: int) -> str:
    """Draw the groups of one deadline: finished groups, then running groups. Counts are rounded up to hide no group."""
    cells = [-(-count // groups_per_cell) for count in (due.finished, due.running)]
    return FINISHED * cells[0] + RUNNING * cells[1]


@dataclass(frozen=True, slots=True)
class Panel:
    """The panel for rich, with sparklines as long and high as the terminal allows."""

    state: Shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        state, height = self.state, console.size.height

        def line(text: str, wraps: bool = False) -> Text:
            cell = plain_text(text.replace("\n", r"\n"))
            cell.no_wrap, cell.overflow = not wraps, "fold" if wraps else "ellipsis"
            return cell

        table = Table.grid(padding=(0, GAP))
        # rich first shrinks columns without a fixed width, so the labels survive a long line.
        table.add_column(style="dim", width=LABEL_WIDTH)
        table.add_column()
        table.add_row("now", line(state.now))
        if state.metrics:
            remaining = "" if state.remaining_s is None else f", {duration(state.remaining_s)} left"
            table.add_row("step", line(f"{state.step} of {state.steps}, weight version {state.version}{remaining}"))
            table.add_row("", ProgressBar(total=state.steps, completed=state.step, width=40))
        for index, finding in enumerate(state.findings):
            table.add_row("" if index else "NOT HEALTHY", line(finding, wraps=height >= TALL))
        trends = list(_trends(state, len(METRIC_ROWS) if height >= TALL else SHORT_ROWS)) if state.metrics else []
        other_rows = [*(_speed(state) if state.metrics else ()), *_buffer(state)]
        faults = [" ".join(fault.split()) for fault in state.faults[-FAULTS:]]
        free = height - table.row_count - len(trends) - len(other_rows) - len(faults) - 2
        added = free // max(1, len(trends))  # lines for each trend: further rows, and an empty line below them
        rows = min(MOST_TREND_ROWS, added) if added > 1 else 1
        value_width = max((len(value) for _, value, _ in trends), default=0)
        columns = max(0, options.max_width - LABEL_WIDTH - value_width - 2 * GAP)
        for label, value, values in trends:
            *upper_lines, lowest_line = sparkline(values[-columns:] if columns else (), rows)
            for bars in upper_lines:
                table.add_row("", line(f"{'':{value_width + GAP}}{bars}".rstrip()))
            table.add_row(line(label), line(f"{value:{value_width}}{' ' * GAP}{lowest_line}".rstrip()))
            if rows > 1:
                table.add_row()
        for name, value in other_rows:
            table.add_row(line(name), line(value))
        for index, fault in enumerate(faults):
            table.add_row("" if index else "last faults", line(fault))
        yield table


def _trends(state: Shown, metric_rows: int) -> Iterator[tuple[str, str, Sequence[float]]]:
    """Labels, values and earlier values. Any metric may be missing in a run of another version of asyncrl."""
    m = state.metrics
    for index, (name, (label, form)) in enumerate(METRIC_ROWS.items()):
        if name in m and index < metric_rows:
            yield label, form.format(m[name]), state.trends.get(name, ())
        if index == 0:
            for series, values in state.accuracy.items():
                series_label = series if ":" in series else f"held-out, {series}"
                yield series_label, f"{values[-1]:.3f}, first {values[0]:.3f}", values
    if "staleness/groups_mean" in m and "staleness/groups_max" in m:
        mean, worst = m["staleness/groups_mean"], m["staleness/groups_max"]
        bound = f"{mean:.2f}, max {worst:.0f} of {state.max_staleness} versions"
        yield "staleness", bound, state.trends.get("staleness/groups_mean", ())


def _speed(state: Shown) -> Iterator[tuple[str, str]]:
    m = state.metrics
    if "tokens/generated_per_s" in m:
        yield "generated", f"{m['tokens/generated_per_s']:,.0f} tokens/s"
    known = {"busy": "share/trainer_busy", "MFU": "mfu/end_to_end"}
    busy = [f"{label} {m[name]:.0%}" for label, name in known.items() if name in m]
    if trainer := ", ".join([*busy, *filter(None, [state.trainer])]):
        yield "trainer", trainer
    shares = {"busy": "share/engines_busy", "paused": "share/engines_paused"}
    spent = [f"{does} {m[name]:.0%}" for does, name in shares.items() if name in m]
    if engines := ", ".join(filter(None, [state.engines, *spent])):
        yield "engines", engines


def _buffer(shown: Shown) -> Iterator[tuple[str, str]]:
    if shown.counts is not None and (shown.metrics or shown.due):
        c = shown.counts
        here = f"{RUNNING} {c.running} running, {FINISHED} {c.finished} finished"
        yield "groups", f"{here}, {c.taken} trained, {c.rejected} rejected"
    if not shown.due:
        return
    per_cell = max(1, -(-max(due.finished + due.running for due in shown.due) // PICTURE_WIDTH))
    for at, due in enumerate(shown.due[:DUE_ROWS]):
        yield (
            "" if at else "to be trained",
            f"by version {due.deadline}  {picture(due, per_cell)}  {due.finished} + {due.running}",
        )
    if more := shown.due[DUE_ROWS:]:
        yield "", f"and {sum(due.finished + due.running for due in more)} groups with later deadlines"
