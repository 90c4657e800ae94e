"""`asyncrl watch`: a run's dashboard in any terminal."""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl_cli.cli.arguments import RunName, RunsDir
from asyncrl_cli.core.terminal import plain_text
from asyncrl_cli.runs.catalogue import find_run
from asyncrl_cli.runs.directory import RunDirectory

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


REFRESH_S = 1.0
"""Seconds between two updates."""
OLDER, NEWER = (b"p", b"\x1b[D", b"\x1bOD"), (b"n", b"\x1b[C", b"\x1bOC")
"""Keys: letters, and the sequences that terminals send for the left and right arrows."""
KEYS = "p older rollout · n newer · f all, right or wrong · 12g to step 12 · c colours · b back · q quit"
KEY = re.compile(rb"\x1b\[[0-9;]*[^0-9;]|\x1bO.|\x1b(?=[^\[O])|[^\x1b]", re.DOTALL)
"""Bytes that terminals send for one key: a single byte, or an escape sequence."""
MOST_DIGITS = 9
"""Largest number of digits in a step number before `g`."""
READ_BYTES = 1024
"""Bytes read at a time, because several keys may arrive together."""


def watch(run: RunName = "latest", runs_dir: RunsDir = Path("runs")) -> None:
    """Watch a run that is running, stopped or dead: reward, accuracy, length, loss and staleness, the activity of
    trainer and engines, the groups in the buffer with their deadlines, and the latest faults.

    Keys: p and n (or the arrows) show the older and newer rollout, f filters by right and wrong, a number and g go to
    the rollouts of that step, c colours tokens by log-prob or weight version, b goes back, q quits. If the output is
    not a terminal, the dashboard is printed once.
    """
    from asyncrl_cli.core.console import PlainConsole
    from asyncrl_cli.inspect.dashboard import Panel
    from asyncrl_cli.inspect.watching import look

    found = find_run(runs_dir, run)
    console = PlainConsole()
    if console.is_terminal:
        try:
            _show_until_quit(Screen(found), console)
        except KeyboardInterrupt:
            return
    else:
        console.print(Panel(look(found)))


class Screen:
    """The screen's contents: the dashboard, or a rollout."""

    def __init__(self, run: RunDirectory) -> None:
        from asyncrl_cli.inspect.watching import Pager

        self._run = run
        self._pager = Pager(run)
        self._paging = False
        self._digits = ""

    def press(self, key: bytes) -> bool:
        """Handle a key. Returns False if it quits."""
        if key.isdigit():
            self._digits = (self._digits + key.decode())[-MOST_DIGITS:]
            return True
        digits, self._digits = self._digits, ""
        if key == b"q":
            return False
        if key in (*OLDER, *NEWER):
            self._pager.turn(older=key in OLDER)
            self._paging = True
        elif key == b"g" and digits:
            self._pager.go_to(int(digits))
            self._paging = True
        elif key == b"f":
            self._pager.filter()
            self._paging = True
        elif key == b"c":
            self._pager.recolour()
        elif key == b"b":
            self._paging = False
        return True

    def draw(self) -> RenderableType:
        from rich.console import Group

        from asyncrl_cli.inspect.dashboard import Panel
        from asyncrl_cli.inspect.watching import look

        shown = self._pager.page() if self._paging else Panel(look(self._run))
        return Group(plain_text(KEYS, "dim"), shown)


def _show_until_quit(screen: Screen, console: Console) -> None:
    from rich.live import Live

    with _keys() as next_keys, Live(console=console, screen=True, auto_refresh=False) as live:
        running = True
        while running:
            live.update(screen.draw(), refresh=True)
            running = all(screen.press(key) for key in next_keys(REFRESH_S))


def split_keys(data: bytes) -> tuple[list[bytes], bytes]:
    """Split a terminal's bytes into keys. Also returns the rest, an incomplete escape sequence."""
    keys, at = [], 0
    while found := KEY.match(data, at):
        keys.append(found[0])
        at = found.end()
    return keys, data[at:]


@contextmanager
def _keys() -> Iterator[Callable[[float], list[bytes]]]:
    """Yield a function that waits up to the given seconds for keys and returns all keys that have arrived.
    In the block, the terminal delivers each key immediately and does not echo it."""
    import termios
    import tty

    source = sys.stdin.fileno()
    rest = b""

    def no_keys(seconds: float) -> list[bytes]:
        select.select([], [], [], seconds)
        return []

    def next_keys(seconds: float) -> list[bytes]:
        nonlocal rest
        if not select.select([source], [], [], seconds)[0]:
            rest = b""  # only the escape key was pressed
            return []
        if not (data := os.read(source, READ_BYTES)):
            return [b"q"]  # the terminal is gone
        keys, rest = split_keys(rest + data)
        return keys

    if not os.isatty(source):  # no keyboard
        yield no_keys
        return
    before = termios.tcgetattr(source)
    try:
        tty.setcbreak(source)
        yield next_keys
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)
