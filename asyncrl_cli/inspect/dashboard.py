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
from asyncrl_cli.inspect.pages import duration, number
from asyncrl_cli.journal.queries import Due
from asyncrl_cli.records.groups import Counts

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

TREND_STEPS = 32
"""Values in a sparkline, which has to fit next to the numbers on a terminal of 80 columns."""
TRENDS = ("reward/mean", "response/tokens_mean", "train/loss", "staleness/groups_mean", "correction/logprob_gap_mean")
"""Metrics with a sparkline."""
BARS = "▁▂▃▄▅▆▇█"
FINISHED, RUNNING = "█", "░"
"""The signs for groups in the picture of the buffer."""
PICTURE_WIDTH = 32
DUE_ROWS = 6
FAULTS = 3
LABEL_WIDTH = len("held-out, sampled")


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


def sparkline(values: Sequence[float]) -> str:
    """Draw one bar per value, scaled from the lowest value to the highest."""
    if not values:
        return ""
    low, span = min(values), max(values) - min(values)
    if not 0.0 < span < math.inf:
        return BARS[0] * len(values)
    return "".join(BARS[int((value - low) / span * (len(BARS) - 1))] for value in values)


def picture(due: Due, groups_per_cell: int) -> str:
    """Draw the groups of one deadline: finished groups, then running groups. Counts are rounded up to hide no group."""
    cells = [-(-count // groups_per_cell) for count in (due.finished, due.running)]
    return FINISHED * cells[0] + RUNNING * cells[1]


def panel(shown: Shown) -> RenderableType:
    """Build the panel, with one line per row."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    def line(text: str) -> Text:
        shown = plain_text(text.replace("\n", r"\n"))
        shown.no_wrap, shown.overflow = True, "ellipsis"
        return shown

    table = Table.grid(padding=(0, 2))
    # rich first shrinks columns without a fixed width, so the labels survive a long line.
    table.add_column(style="dim", width=LABEL_WIDTH)
    table.add_column()
    table.add_row("now", line(shown.now))
    if shown.metrics:
        left = "" if shown.remaining_s is None else f", {duration(shown.remaining_s)} left"
        table.add_row("step", line(f"{shown.step} of {shown.steps}, weight version {shown.version}{left}"))
        table.add_row("", ProgressBar(total=shown.steps, completed=shown.step, width=40))
        for name, value in _rows(shown):
            table.add_row(line(name), line(value))
    for name, value in _buffer(shown):
        table.add_row(line(name), line(value))
    for at, fault in enumerate(shown.faults[-FAULTS:]):
        table.add_row("" if at else "last faults", line(" ".join(fault.split())))
    return table


def _rows(shown: Shown) -> Iterator[tuple[str, str]]:
    """Rows of the newest step. Any metric may be missing in a run of another version of asyncrl."""
    m = shown.metrics

    def trend(name: str) -> str:
        return sparkline(shown.trends.get(name, ())[-TREND_STEPS:])

    if "reward/mean" in m:
        yield "reward", f"{m['reward/mean']:.3f}  {trend('reward/mean')}"
    for kind, values in shown.accuracy.items():
        label = kind if ":" in kind else f"held-out, {kind}"
        yield label, f"{values[-1]:.3f}  {sparkline(values[-TREND_STEPS:])}  (first {values[0]:.3f})"
    if "response/tokens_mean" in m:
        yield "response", f"{m['response/tokens_mean']:.1f} tokens  {trend('response/tokens_mean')}"
    if "train/loss" in m:
        yield "loss", f"{m['train/loss']:+.3f}  {trend('train/loss')}"
    if "staleness/groups_mean" in m and "staleness/groups_max" in m:
        mean, worst = m["staleness/groups_mean"], m["staleness/groups_max"]
        bound = f"mean {mean:.2f}, max {worst:.0f} of {shown.max_staleness} versions"
        yield "staleness", f"{bound}  {trend('staleness/groups_mean')}"
    if "correction/logprob_gap_mean" in m:
        gap = number(m["correction/logprob_gap_mean"])
        yield "log-prob gap", f"{gap} nats  {trend('correction/logprob_gap_mean')}"
    if "tokens/generated_per_s" in m:
        yield "generated", f"{m['tokens/generated_per_s']:,.0f} tokens/s"
    known = {"busy": "share/trainer_busy", "MFU": "mfu/end_to_end"}
    busy = [f"{label} {m[name]:.0%}" for label, name in known.items() if name in m]
    if trainer := ", ".join([*busy, *filter(None, [shown.trainer])]):
        yield "trainer", trainer
    shares = {"busy": "share/engines_busy", "paused": "share/engines_paused"}
    spent = [f"{does} {m[name]:.0%}" for does, name in shares.items() if name in m]
    if engines := ", ".join(filter(None, [shown.engines, *spent])):
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
