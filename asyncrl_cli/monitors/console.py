"""The console output of a run: a live panel in a terminal, a line per step elsewhere."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from asyncrl_cli.core.secrets import hide
from asyncrl_cli.core.terminal import counted, printable
from asyncrl_cli.inspect.dashboard import Panel, Shown
from asyncrl_cli.inspect.health import step_notes
from asyncrl_cli.inspect.watching import look
from asyncrl_cli.monitors.base import EvaluationResult, Monitor, RunInfo
from asyncrl_cli.monitors.outlet import Outlet, Terminal
from asyncrl_cli.records.groups import Counts
from asyncrl_cli.runs.directory import RunDirectory

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

DRAW_S = 0.25
"""Seconds between two frames."""
LOOK_S = 1.0
"""Seconds between two updates of the panel from the run's files."""
LOOK_SHARE = 0.01
"""Largest share of time spent reading: on a slow disk the panel is updated less often."""


def step_line(
    step: int, steps: int, metrics: Mapping[str, float], accuracy: Mapping[str, float], spec: Mapping[str, Any]
) -> str:
    held_out = f"  held-out {accuracy['greedy']:.3f}" if "greedy" in accuracy else ""
    mfu = f"  MFU {metrics['mfu/end_to_end']:.0%}" if "mfu/end_to_end" in metrics else ""
    return (
        f"step {step}/{steps}  reward {metrics['reward/mean']:.3f}{step_notes(metrics, spec)}{held_out}"
        f"  length {metrics['response/tokens_mean']:.1f}"
        f"  staleness {metrics['staleness/groups_mean']:.1f} max {metrics['staleness/groups_max']:.0f}"
        f"  {metrics['tokens/generated_per_s']:,.0f} tok/s{mfu}"
        f"  busy: trainer {metrics['share/trainer_busy']:.0%}, engines {metrics['share/engines_busy']:.0%}"
        f"  groups: {metrics['buffer/groups_running']:.0f} running, {metrics['buffer/groups_finished']:.0f} finished"
    )


class PlainView(Monitor):
    """A line per step, for logs and pipes."""

    def __init__(self, steps: int, out: SupportsWrite[str]) -> None:
        self._steps = steps
        self._out = out
        self._accuracy: dict[str, float] = {}
        self._spec: Mapping[str, Any] = {}
        self._stage = ""
        self._started = time.monotonic()

    def started(self, run: RunInfo) -> None:
        self._spec = run.spec

    def status(self, text: str) -> None:
        # Progress inside a stage ("warm start: 12 of 1000 updates") would flood a log.
        stage = text.split(":")[0]
        if stage != self._stage:
            self._stage = stage
            self._print(stage)

    def warn(self, text: str) -> None:
        self._print(f"! {text}")

    def stepped(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        line = step_line(step, steps=self._steps, metrics=metrics, accuracy=self._accuracy, spec=self._spec)
        self._print(line)

    def evaluated(self, result: EvaluationResult) -> None:
        self._accuracy[result.kind] = result.accuracy
        several = f"  pass@{result.samples} {result.pass_at[-1]:.3f}" if result.pass_at else ""
        self._print(
            f"held-out {result.kind} accuracy {result.accuracy:.3f}{several} at step {result.step}"
            f" ({counted(result.prompts, 'prompt')}, {result.mean_length:.1f} tokens)"
        )

    def _print(self, text: str) -> None:
        self._out.write(f"{time.monotonic() - self._started:6.1f} s  {text}\n")


class QuietView(Monitor):
    """Shows only warnings and errors, on standard error."""

    def __init__(self, err: SupportsWrite[str]) -> None:
        self._err = err

    def warn(self, text: str) -> None:
        self._err.write(f"! {text}\n")


class LiveView(Monitor):
    """The panel of `asyncrl watch`, redrawn in place, with the loop's current activity."""

    def __init__(self, out: Outlet, run: RunDirectory) -> None:
        self._out = out
        self._run = run
        self._doing = ""
        self._seen = Shown("")
        self._lines = 0  # height of the frame on the screen
        self._drawing = Lock()

    def look(self) -> None:
        """Read the run's state. Raises nothing, because training continues whatever is wrong with the disk."""
        with suppress(Exception):
            self._seen = look(self._run)

    def draw(self, warning: str = "") -> None:
        """Redraw the panel, below a warning if there is one. The cursor stays visible, because a kill would leave it
        hidden."""
        from asyncrl_cli.core.console import PlainConsole

        width, height = self._out.size
        console = PlainConsole(width=width, height=height, force_terminal=True)
        with console.capture() as frame:
            console.print(Panel(replace(self._seen, now=self._doing)))
        lines = frame.get().splitlines()[: height - 1]
        with self._drawing:
            back = f"\x1b[{self._lines}F\x1b[J" if self._lines else ""
            self._lines = len(lines)
            self._out.draw(back + warning + "".join(f"{line}\n" for line in lines), warning)

    def status(self, text: str) -> None:
        self._doing = text  # the thread shows it: the loop may call this often

    def doing(self, text: str, counts: Counts) -> None:
        self.status(text)

    def warn(self, text: str) -> None:
        self.draw(f"! {printable(hide(text))}\n")


@contextmanager
def looking(view: LiveView) -> Iterator[None]:
    """Let the view look and draw repeatedly in its own thread: then a slow disk does not delay the loop."""
    ended = Event()

    def look_on() -> None:
        looked = took = -math.inf
        while not ended.wait(DRAW_S):
            started = time.perf_counter()
            if started - looked >= max(LOOK_S, took / LOOK_SHARE):
                view.look()
                looked = time.perf_counter()
                took = looked - started
            with suppress(Exception):  # including errors of the terminal
                view.draw()

    thread = Thread(target=look_on, name="live-view", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(LOOK_S)
        if not thread.is_alive():
            view.look()
            view.draw()  # this frame stays on the screen


@contextmanager
def open_view(run: RunDirectory, steps: int, terminal: Terminal, quiet: bool = False) -> Iterator[Monitor]:
    """Open the view that fits the output: a live panel in a terminal, else a line per step; or a ``quiet`` view."""
    if quiet:
        yield QuietView(terminal.err)
    elif not terminal.out.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        yield PlainView(steps, terminal.out)
    else:
        view = LiveView(terminal.out, run)
        with looking(view):
            yield view
