"""The console output of a run: a live panel on a terminal, a line per step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from threading import Event, Thread, local
from typing import IO, TYPE_CHECKING, Protocol, cast

from asyncrl_cli.core.terminal import counted, printable
from asyncrl_cli.inspect.dashboard import Shown, panel
from asyncrl_cli.inspect.watching import look
from asyncrl_cli.monitors.base import EvaluationResult, Monitor
from asyncrl_cli.monitors.outlet import Outlet, Terminal
from asyncrl_cli.records.groups import Counts
from asyncrl_cli.runs.directory import RunDirectory

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

LOOK_S = 1.0
"""Seconds between two updates of the panel from the run's files."""
LOOK_SHARE = 0.01
"""Largest share of the time that reading may take: on a slow disk the panel is updated less often."""


class SupportsWrite(Protocol):
    """Where text goes."""

    def write(self, text: str, /) -> object:
        """Add to it."""


def step_line(step: int, steps: int, metrics: Mapping[str, float], accuracy: Mapping[str, float]) -> str:
    held_out = f"  held-out {accuracy['greedy']:.3f}" if "greedy" in accuracy else ""
    return (
        f"step {step}/{steps}  reward {metrics['reward/mean']:.3f}{held_out}"
        f"  length {metrics['response/tokens_mean']:.1f}"
        f"  staleness {metrics['staleness/groups_mean']:.1f} max {metrics['staleness/groups_max']:.0f}"
        f"  {metrics['tokens/generated_per_s']:,.0f} tok/s"
        f"  busy: trainer {metrics['share/trainer_busy']:.0%}, engines {metrics['share/engines_busy']:.0%}"
        f"  groups: {metrics['buffer/groups_running']:.0f} running, {metrics['buffer/groups_finished']:.0f} finished"
    )


class PlainView(Monitor):
    """A line per step, for logs and pipes."""

    def __init__(self, steps: int, out: SupportsWrite) -> None:
        self._steps = steps
        self._out = out
        self._accuracy: dict[str, float] = {}
        self._stage = ""
        self._started = time.monotonic()

    def status(self, text: str) -> None:
        # Progress inside a stage ("warm start: 12 of 1000 updates") would flood a log.
        stage = text.split(":")[0]
        if stage != self._stage:
            self._stage = stage
            self._print(stage)

    def warn(self, text: str) -> None:
        self._print(f"! {text}")

    def stepped(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        self._print(step_line(step, self._steps, metrics, self._accuracy))

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

    def __init__(self, err: SupportsWrite) -> None:
        self._err = err

    def warn(self, text: str) -> None:
        self._err.write(f"! {text}\n")


class LiveView(Monitor):
    """The panel of `asyncrl watch`, drawn over itself, with the current activity of the loop."""

    def __init__(self, live: Live, run: RunDirectory) -> None:
        self._live = live
        self._run = run
        self._doing = ""
        self._seen = Shown("")

    def look(self) -> None:
        """Read the state of the run. Raises nothing, and may be called on another thread."""
        with suppress(Exception):  # whatever is wrong with the disk or the terminal, training continues
            self._seen = look(self._run)
            self._draw()

    def status(self, text: str) -> None:
        self._doing = text
        self._draw()

    def doing(self, text: str, counts: Counts) -> None:
        self.status(text)

    def warn(self, text: str) -> None:
        line = f"! {printable(text)}"
        file = self._live.console.file
        with file.keeping(f"{line}\n") if isinstance(file, _Canvas) else nullcontext():
            self._live.console.print(line, markup=False, highlight=False)

    def _draw(self) -> None:
        self._live.update(panel(replace(self._seen, now=self._doing)))


@contextmanager
def looking(view: LiveView) -> Iterator[None]:
    """Have the view look repeatedly, on its own thread: no disk delays the loop."""
    ended = Event()

    def look_on() -> None:
        took = 0.0
        while not ended.wait(max(LOOK_S, took / LOOK_SHARE)):
            started = time.perf_counter()
            view.look()
            took = time.perf_counter() - started

    thread = Thread(target=look_on, name="live-view", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(LOOK_S)
        if not thread.is_alive():
            view.look()  # this one stays on the screen


@contextmanager
def open_view(run: RunDirectory, steps: int, terminal: Terminal, quiet: bool = False) -> Iterator[Monitor]:
    """The view of a run of so many steps that fits where the output goes, or a ``quiet`` one."""
    if quiet:
        yield QuietView(terminal.err)
        return
    if not terminal.out.isatty():
        yield PlainView(steps, terminal.out)
        return
    from rich.live import Live

    console = screen(terminal.out)
    # Other output of this process has its own file.
    with Live(console=console, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False) as live:
        view = LiveView(live, run)
        with looking(view):
            yield view


class _Canvas:
    """The file that rich draws to. It passes each frame on to an outlet."""

    encoding = "utf-8"

    def __init__(self, out: Outlet) -> None:
        self._out = out
        self._kept = local()
        self.flush, self.isatty = out.flush, out.isatty

    def write(self, text: str) -> int:
        return self._out.draw(text, getattr(self._kept, "lines", ""))

    @contextmanager
    def keeping(self, lines: str) -> Iterator[None]:
        """A block in which this thread writes ``lines``. If they are dropped, they are counted, unlike frames."""
        self._kept.lines = lines
        try:
            yield
        finally:
            self._kept.lines = ""


def screen(out: Outlet) -> Console:
    """A rich console that draws through an outlet."""
    from rich.console import ConsoleDimensions

    from asyncrl_cli.core.console import PlainConsole

    class Screen(PlainConsole):
        @property  # type: ignore[misc]  # rich's can be set, but never is
        def size(self) -> ConsoleDimensions:
            return ConsoleDimensions(*out.size)

        def show_cursor(self, show: bool = True) -> bool:
            return False  # a hidden cursor would stay hidden after a kill

    return Screen(file=cast("IO[str]", _Canvas(out)))
