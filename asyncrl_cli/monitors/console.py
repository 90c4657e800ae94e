"""The console output of a run: a live panel in a terminal, a line per step elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from asyncrl_cli.core.secrets import hide
from asyncrl_cli.core.terminal import counted, printable
from asyncrl_cli.inspect.dashboard import Panel, RunView, look
from asyncrl_cli.inspect.health import teaching_groups
from asyncrl_cli.monitors.base import EvaluationResult, Monitor, RunInfo
from asyncrl_cli.monitors.outlet import Outlet, Terminal
from asyncrl_cli.records.groups import Counts
from asyncrl_cli.runs.directory import RunDirectory

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

REFRESH_S = 1.0  # seconds between two frames


def step_line(
    step: int, steps: int, metrics: Mapping[str, float], accuracy: Mapping[str, float], spec: Mapping[str, Any]
) -> str:
    held_out = f"  held-out {accuracy['greedy']:.3f}" if "greedy" in accuracy else ""
    mfu = f"  MFU {metrics['mfu/end_to_end']:.0%}" if "mfu/end_to_end" in metrics else ""
    return (
        f"step {step}/{steps}  reward {metrics['reward/mean']:.3f}{teaching_groups(metrics, spec)}{held_out}"
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
        self._text = ""
        self._started = time.monotonic()

    def started(self, run: RunInfo) -> None:
        self._spec = run.spec

    def status(self, text: str, counts: Counts | None = None) -> None:
        if counts is None and text != self._text:  # the loop's progress would flood a log
            self._text = text
            self._print(text)

    def warn(self, text: str) -> None:
        self._print(f"! {text}")

    def stepped(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        self._print(step_line(step, self._steps, metrics, accuracy=self._accuracy, spec=self._spec))

    def evaluated(self, result: EvaluationResult) -> None:
        self._accuracy[result.kind] = result.accuracy
        pass_at = f"  pass@{result.samples} {result.pass_at[-1]:.3f}" if result.pass_at else ""
        self._print(
            f"held-out {result.kind} accuracy {result.accuracy:.3f}{pass_at} at step {result.step}"
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
    """The panel of `asyncrl watch`, redrawn in place by a thread, with the loop's current activity."""

    def __init__(self, out: Outlet, run: RunDirectory) -> None:
        self._out = out
        self._run = run
        self._activity = ""
        self._view = RunView("")
        self._height = 0  # lines of the frame on the screen
        self._drawing = Lock()
        self._end_event = Event()
        self._thread = Thread(target=self._redraw, name="live-view", daemon=True)

    def __enter__(self) -> LiveView:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end_event.set()
        self._thread.join(REFRESH_S)
        if not self._thread.is_alive():  # otherwise the disk hangs
            self._look_and_draw()  # this frame stays on the screen

    def _redraw(self) -> None:
        while not self._end_event.wait(REFRESH_S):
            self._look_and_draw()

    def _look_and_draw(self) -> None:
        """Raises nothing, because training continues whatever is wrong with the disk or the terminal."""
        with suppress(Exception):
            self._view = look(self._run)
        with suppress(Exception):
            self._draw()

    def _draw(self, warning: str = "") -> None:
        """Redraw the panel, below a warning if there is one. The cursor stays visible, because a kill would leave it
        hidden."""
        from asyncrl_cli.core.console import PlainConsole

        width, height = self._out.size
        console = PlainConsole(width=width, height=height, force_terminal=True)
        with console.capture() as frame:
            console.print(Panel(replace(self._view, activity=self._activity)))
        lines = frame.get().splitlines()[: height - 1]
        with self._drawing:
            start = f"\x1b[{self._height}F\x1b[J" if self._height else ""
            self._height = len(lines)
            self._out.draw(start + warning + "".join(f"{line}\n" for line in lines), warning.count("\n"))

    def status(self, text: str, counts: Counts | None = None) -> None:
        self._activity = text  # the thread shows it: the loop may call this often

    def warn(self, text: str) -> None:
        self._draw(f"! {printable(hide(text))}\n")


@contextmanager
def open_view(run: RunDirectory, steps: int, terminal: Terminal, quiet: bool = False) -> Iterator[Monitor]:
    """Open the view that fits the output: a live panel in a terminal, else a line per step; or a ``quiet`` view."""
    if quiet:
        yield QuietView(terminal.err)
    elif not terminal.out.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        yield PlainView(steps, terminal.out)
    else:
        with LiveView(terminal.out, run) as view:
            yield view
