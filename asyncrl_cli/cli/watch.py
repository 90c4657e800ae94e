"""`asyncrl watch`: a run's dashboard in any terminal."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from asyncrl_cli.cli.arguments import RunName, RunsDir
from asyncrl_cli.runs.catalogue import find_run

REFRESH_S = 1.0
"""Seconds between two updates."""


def watch(run: RunName = "latest", runs_dir: RunsDir = Path("runs")) -> None:
    """Watch a run that is running, stopped or dead: reward, accuracy, length, loss and staleness, the activity of
    trainer and engines, the groups in the buffer with their deadlines, and the latest faults.

    Ctrl-C quits. If the output is not a terminal, the dashboard is printed once.
    """
    from rich.live import Live

    from asyncrl_cli.core.console import PlainConsole
    from asyncrl_cli.inspect.dashboard import Panel, look

    directory = find_run(runs_dir, run)
    console = PlainConsole()
    if not console.is_terminal:
        console.print(Panel(look(directory)))
        return
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(Panel(look(directory)), refresh=True)
            time.sleep(REFRESH_S)
