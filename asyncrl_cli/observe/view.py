"""What a person sees of a run: one live panel on a terminal, a line per step elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from asyncrl_cli.buffer.ledger import Counts
from asyncrl_cli.observe.records import EvaluationResult
from asyncrl_cli.observe.reporter import View

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

TREND_STEPS = 32
"""Values that a sparkline shows; so many fit beside the numbers on a terminal of 80 columns."""
BARS = "▁▂▃▄▅▆▇█"
LABEL_WIDTH = len("held-out, sampled")


def sparkline(values: list[float]) -> str:
    """A bar per value, from the lowest to the highest of them."""
    if not values:
        return ""
    low, span = min(values), max(values) - min(values)
    if not 0.0 < span < math.inf:
        return BARS[0] * len(values)
    return "".join(BARS[int((value - low) / span * (len(BARS) - 1))] for value in values)


def step_line(step: int, steps: int, metrics: Mapping[str, float], accuracy: Mapping[str, float]) -> str:
    """One step in one line."""
    held_out = f"  held-out {accuracy['greedy']:.3f}" if "greedy" in accuracy else ""
    return (
        f"step {step}/{steps}  reward {metrics['reward/mean']:.3f}{held_out}"
        f"  length {metrics['response/tokens_mean']:.1f}"
        f"  staleness {metrics['staleness/groups_mean']:.1f} max {metrics['staleness/groups_max']:.0f}"
        f"  {metrics['tokens/generated_per_s']:,.0f} tok/s"
        f"  busy: trainer {metrics['share/trainer_busy']:.0%}, engines {metrics['share/engines_busy']:.0%}"
        f"  groups: {metrics['buffer/groups_running']:.0f} running, {metrics['buffer/groups_finished']:.0f} finished"
    )


class PlainView:
    """A line per step, for logs and pipes."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._accuracy: dict[str, float] = {}
        self._stage = ""
        self._started = time.monotonic()

    def status(self, text: str) -> None:
        # Progress inside a stage ("warm start: 12 of 1000 updates") would flood a log.
        stage = text.split(":")[0]
        if stage != self._stage:
            self._stage = stage
            self._print(stage)

    def doing(self, text: str, counts: Counts) -> None:
        pass

    def warn(self, text: str) -> None:
        self._print(f"! {text}")

    def stepped(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        self._print(step_line(step, self._steps, metrics, self._accuracy))

    def evaluated(self, result: EvaluationResult) -> None:
        self._accuracy[result.kind] = result.accuracy
        several = f"  pass@{result.samples} {result.pass_at[-1]:.3f}" if result.pass_at else ""
        self._print(
            f"held-out {result.kind} accuracy {result.accuracy:.3f}{several} at step {result.step}"
            f" ({result.prompts} prompts, {result.mean_length:.1f} tokens)"
        )

    def _print(self, text: str) -> None:
        print(f"{time.monotonic() - self._started:6.1f} s  {text}", flush=True)


class LiveView:
    """One panel that is drawn over itself."""

    def __init__(self, live: Live, steps: int, max_staleness: int) -> None:
        self._live = live
        self._steps = steps
        self._max_staleness = max_staleness
        self._status = ""
        self._counts: Counts | None = None
        self._step = self._version = 0
        self._metrics: Mapping[str, float] = {}
        self._trend: dict[str, deque[float]] = {}
        self._accuracy: dict[str, list[float]] = {}
        self._since = time.monotonic()
        self._first_step = 0

    def status(self, text: str) -> None:
        self._status = text
        self._live.update(self._panel())

    def doing(self, text: str, counts: Counts) -> None:
        self._status, self._counts = text, counts
        self._live.update(self._panel())

    def warn(self, text: str) -> None:
        self._live.console.print(f"! {text}", markup=False, highlight=False)

    def stepped(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        if not self._metrics:
            self._since, self._first_step = time.monotonic(), step
        self._step, self._version, self._metrics = step, version, metrics
        for name in ("reward/mean", "response/tokens_mean"):
            self._trend.setdefault(name, deque(maxlen=TREND_STEPS)).append(metrics[name])
        self._live.update(self._panel())

    def evaluated(self, result: EvaluationResult) -> None:
        self._accuracy.setdefault(result.kind, []).append(result.accuracy)
        self._live.update(self._panel())

    def _panel(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        def line(text: str) -> Text:  # not a plain string, in which rich would look for markup
            return Text(text, no_wrap=True, overflow="ellipsis")

        table = Table.grid(padding=(0, 2))
        # rich takes room from columns without a fixed width first, so that labels survive a long line.
        table.add_column(style="dim", width=LABEL_WIDTH)
        table.add_column()
        table.add_row("now", line(self._status))
        if self._metrics:
            table.add_row(
                "step", line(f"{self._step} of {self._steps}, weight version {self._version}{self._remaining()}")
            )
            table.add_row("", ProgressBar(total=self._steps, completed=self._step, width=40))
            for name, value in self._rows():
                table.add_row(name, line(value))
        return table

    def _rows(self) -> Iterator[tuple[str, str]]:
        m = self._metrics
        yield "reward", f"{m['reward/mean']:.3f}  {sparkline(list(self._trend['reward/mean']))}"
        for kind, values in self._accuracy.items():
            label = kind if ":" in kind else f"held-out, {kind}"
            yield label, f"{values[-1]:.3f}  {sparkline(values[-TREND_STEPS:])}  (first {values[0]:.3f})"
        lengths = sparkline(list(self._trend["response/tokens_mean"]))
        yield "response", f"{m['response/tokens_mean']:.1f} tokens  {lengths}"
        mean, worst = m["staleness/groups_mean"], m["staleness/groups_max"]
        yield "staleness", f"mean {mean:.2f}, max {worst:.0f} of {self._max_staleness} versions"
        yield "generated", f"{m['tokens/generated_per_s']:,.0f} tokens/s"
        yield "busy", f"trainer {m['share/trainer_busy']:.0%}, engines {m['share/engines_busy']:.0%}"
        if self._counts is not None:
            c = self._counts
            yield "groups", f"{c.running} running, {c.finished} finished, {c.taken} trained, {c.rejected} rejected"

    def _remaining(self) -> str:
        done = self._step - self._first_step
        if done < 2:
            return ""
        seconds = (time.monotonic() - self._since) / done * (self._steps - self._step)
        return f", {int(seconds // 60)}:{int(seconds % 60):02d} left"


@contextmanager
def open_view(steps: int, max_staleness: int) -> Iterator[View]:
    """The view that fits where the output goes."""
    if not sys.stdout.isatty():
        yield PlainView(steps)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), refresh_per_second=4, transient=False) as live:
        yield LiveView(live, steps, max_staleness)
