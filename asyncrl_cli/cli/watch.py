"""`asyncrl watch`: a run's dashboard in any terminal."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl_cli.cli.arguments import RunName, RunsDir
from asyncrl_cli.core.terminal import plain_text
from asyncrl_cli.runs.catalogue import find_run
from asyncrl_cli.runs.directory import RunDirectory

if TYPE_CHECKING:
    from rich.console import RenderableType


REFRESH_S = 1.0
"""Seconds between two updates."""
KEYS = "p older rollout · n newer · f all, right or wrong · b back · q quit"
READ_BYTES = 1024
"""Bytes read at a time, because several keys may arrive together."""


def watch(run: RunName = "latest", runs_dir: RunsDir = Path("runs")) -> None:
    """Watch a run that is running, stopped or dead: reward, accuracy, length, loss and staleness, the activity of
    trainer and engines, the groups in the buffer with their deadlines, and the latest faults.

    Keys: p and n show the older and newer rollout, f filters by right and wrong, b goes back, q quits. If the output is
    not a terminal, the dashboard is printed once.
    """
    from rich.live import Live

    from asyncrl_cli.core.console import PlainConsole
    from asyncrl_cli.inspect.dashboard import Panel, look

    directory = find_run(runs_dir, run)
    console = PlainConsole()
    if not console.is_terminal:
        console.print(Panel(look(directory)))
        return
    screen = Screen(directory)
    try:
        with _unbuffered_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
            live.update(screen.draw(), refresh=True)
            while all(map(screen.press, _keys(REFRESH_S))):
                live.update(screen.draw(), refresh=True)
    except KeyboardInterrupt:
        return


class Screen:
    """The screen's contents: the dashboard, or a rollout."""

    def __init__(self, run: RunDirectory) -> None:
        from asyncrl_cli.inspect.rollout_pager import Pager

        self._run = run
        self._pager = Pager(run)
        self._is_paging = False

    def press(self, key: str) -> bool:
        """Handle a key. Returns False if it quits."""
        if key in "pn":
            self._pager.turn(older=key == "p")
        elif key == "f":
            self._pager.next_filter()
        self._is_paging = key in "pnf" or (self._is_paging and key != "b")
        return key != "q"

    def draw(self) -> RenderableType:
        from rich.console import Group

        from asyncrl_cli.inspect.dashboard import Panel, look

        page = self._pager.page() if self._is_paging else Panel(look(self._run))
        return Group(plain_text(KEYS, "dim"), page)


@contextmanager
def _unbuffered_keys() -> Iterator[None]:
    """In the block, the terminal delivers each key immediately and does not echo it."""
    import termios
    import tty

    if not sys.stdin.isatty():  # no keyboard
        yield
        return
    settings = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)


def _keys(timeout_s: float) -> str:
    """Wait for keys, and return all that have arrived."""
    source = [sys.stdin] if sys.stdin.isatty() else []
    if not select.select(source, [], [], timeout_s)[0]:
        return ""
    return os.read(sys.stdin.fileno(), READ_BYTES).decode(errors="replace") or "q"  # nothing: the terminal is gone
