"""`asyncrl watch`: a dashboard of a run, from any terminal."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl_cli.cli.arguments import RunName, RunsDir

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from asyncrl_cli.runs.directory import RunDirectory

LOOK_S = 1.0
"""Seconds between two looks."""
OLDER, NEWER = (b"p", b"\x1b[D"), (b"n", b"\x1b[C")
"""Keys: letters, and what terminals send for the arrows to the left and the right."""
KEYS = "p older rollout · n newer · c colours · b back · q quit"


def watch(run: RunName = "latest", runs_dir: RunsDir = Path("runs")) -> None:
    """Watch a run that is running, stopped or dead: reward, accuracy, length, loss and staleness, what trainer and
    engines do, the groups in the buffer against their deadlines, the last faults.

    Keys: p and n (or the arrows) page through rollouts, c colours their tokens by log-prob or weight version, b goes
    back, q quits. Where the output is no terminal, one look is printed.
    """
    from rich.console import Console

    from asyncrl_cli.observe.dashboard import panel
    from asyncrl_cli.observe.watching import look
    from asyncrl_cli.runs.catalogue import find_run

    found = find_run(runs_dir, run)
    console = Console()
    if console.is_terminal:
        try:
            _stay(Screen(found), console)
        except KeyboardInterrupt:
            return
    else:
        console.print(panel(look(found)))


class Screen:
    """What is on the screen: the dashboard, or a rollout."""

    def __init__(self, run: RunDirectory) -> None:
        from asyncrl_cli.observe.watching import Pager

        self._run = run
        self._pager = Pager(run)
        self._paging = False

    def press(self, key: bytes) -> bool:
        """Take a key in; False when it quits."""
        if key == b"q":
            return False
        if key in (*OLDER, *NEWER):
            self._pager.turn(older=key in OLDER)
            self._paging = True
        elif key == b"c":
            self._pager.recolour()
        elif key == b"b":
            self._paging = False
        return True

    def draw(self) -> RenderableType:
        """The screen as it is now."""
        from rich.console import Group
        from rich.text import Text

        from asyncrl_cli.observe.dashboard import panel
        from asyncrl_cli.observe.watching import look

        shown = self._pager.page() if self._paging else panel(look(self._run))
        return Group(Text(KEYS, style="dim"), shown)


def _stay(screen: Screen, console: Console) -> None:
    from rich.live import Live

    with _keys() as next_key, Live(console=console, screen=True, auto_refresh=False) as live:
        going = True
        while going:
            live.update(screen.draw(), refresh=True)
            key = next_key(LOOK_S)
            going = key is None or screen.press(key)


@contextmanager
def _keys() -> Iterator[Callable[[float], bytes | None]]:
    """A function that waits so many seconds for a key. Meanwhile the terminal gives keys at once, and shows none."""
    import termios
    import tty

    source = sys.stdin.fileno()

    def no_key(seconds: float) -> None:
        select.select([], [], [], seconds)

    def next_key(seconds: float) -> bytes | None:
        return os.read(source, 8) if select.select([source], [], [], seconds)[0] else None

    if not os.isatty(source):  # nobody can press anything
        yield no_key
        return
    before = termios.tcgetattr(source)
    try:
        tty.setcbreak(source)
        yield next_key
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)
