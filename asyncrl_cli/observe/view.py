"""What a person sees of a run: one live panel on a terminal, a line per step elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncrl_cli.buffer.ledger import Counts
from asyncrl_cli.observe.dashboard import TREND_STEPS, TRENDS, Shown, panel
from asyncrl_cli.observe.records import EvaluationResult
from asyncrl_cli.observe.reporter import View

if TYPE_CHECKING:
    from rich.live import Live


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


class QuietView:
    """Nothing but what went wrong, on standard error."""

    def status(self, text: str) -> None:
        pass

    def doing(self, text: str, counts: Counts) -> None:
        pass

    def warn(self, text: str) -> None:
        print(f"! {text}", file=sys.stderr, flush=True)

    def stepped(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        pass

    def evaluated(self, result: EvaluationResult) -> None:
        pass


class LiveView:
    """The panel, drawn over itself."""

    def __init__(self, live: Live, steps: int, max_staleness: int) -> None:
        self._live = live
        self._shown = Shown("", steps=steps, max_staleness=max_staleness)
        self._trends: dict[str, deque[float]] = {name: deque(maxlen=TREND_STEPS) for name in TRENDS}
        self._accuracy: dict[str, list[float]] = {}
        self._first: tuple[float, int] | None = None  # when the first step was done, and which it was

    def status(self, text: str) -> None:
        self._show(now=text)

    def doing(self, text: str, counts: Counts) -> None:
        self._show(now=text, counts=counts)

    def warn(self, text: str) -> None:
        self._live.console.print(f"! {text}", markup=False, highlight=False)

    def stepped(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        for name, values in self._trends.items():
            if name in metrics:
                values.append(metrics[name])
        self._show(
            step=step,
            version=version,
            metrics=metrics,
            trends={name: list(values) for name, values in self._trends.items()},
            remaining_s=self._remaining(step),
        )

    def evaluated(self, result: EvaluationResult) -> None:
        self._accuracy.setdefault(result.kind, []).append(result.accuracy)
        self._show(accuracy=self._accuracy)

    def _show(self, **changes: Any) -> None:
        self._shown = replace(self._shown, **changes)
        self._live.update(panel(self._shown))

    def _remaining(self, step: int) -> float | None:
        now = time.monotonic()
        since, first = self._first = self._first or (now, step)
        done = step - first
        return (now - since) / done * (self._shown.steps - step) if done >= 2 else None


@contextmanager
def open_view(steps: int, max_staleness: int, quiet: bool = False) -> Iterator[View]:
    """The view that fits where the output goes, or a ``quiet`` one."""
    if quiet:
        yield QuietView()
        return
    if not sys.stdout.isatty():
        yield PlainView(steps)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), refresh_per_second=4, transient=False) as live:
        yield LiveView(live, steps, max_staleness)
