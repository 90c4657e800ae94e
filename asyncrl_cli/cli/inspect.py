"""`asyncrl inspect`: what is in a run's buffer, and what the run has done. Reads the journal; needs no Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.cli.arguments import AsJson, RunName, RunsDir, one_of
from asyncrl_cli.cli.command import add
from asyncrl_cli.cli.output import echo, echo_json

if TYPE_CHECKING:
    from asyncrl_cli.inspect.pages import Page

WATCH_S = 1.0
"""Seconds between two looks of ``--watch``."""

LISTED = 20
"""Groups that a list shows when nobody says how many."""

app = typer.Typer(
    help="Look into a run: one that is running, stopped or dead.", no_args_is_help=True, rich_markup_mode=None
)


def _states() -> Iterable[str]:
    from asyncrl_cli.journal.queries import STATES

    return STATES


def inspect_buffer(
    run: RunName = "latest",
    group: Annotated[
        str | None, typer.Option("--group", metavar="ID", help="Show one group: its id, or its prompt's uid.")
    ] = None,
    rollout: Annotated[
        str | None, typer.Option("--rollout", metavar="ID", help="Show one rollout, such as 12-3, token by token.")
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            metavar="STATE",
            autocompletion=one_of(_states),
            help="List groups: running, finished, taken (not trained yet), trained, rejected or requeued.",
        ),
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option("--min-reward", metavar="REWARD", help="List groups with at least this mean reward.")
    ] = None,
    stale_over: Annotated[
        int | None,
        typer.Option(
            "--stale-over",
            metavar="N",
            help="List groups with a lag of more versions than this.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            min=1,
            help=f"List so many groups, newest first; {LISTED} when left out.",
            metavar="N",
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every second, until Ctrl-C.")] = False,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show what is in a run's buffer, list some of its groups, or show one.

    Steps count from 1, as in metrics.jsonl. A group's lag is what its staleness was when it was taken, or would be now.
    """
    from asyncrl_cli.inspect.buffer_pages import group_page, list_page, overview_page, rollout_page
    from asyncrl_cli.journal.queries import STATES, GroupFilter, snapshot
    from asyncrl_cli.journal.schema import FILE
    from asyncrl_cli.records.generation import group_and_index
    from asyncrl_cli.runs.catalogue import find_run

    wanted = [at for at in STATES if at == state]
    if state is not None and not wanted:
        raise typer.BadParameter(f"is one of {', '.join(STATES)}", param_hint="--state")
    filters = GroupFilter(wanted[0] if wanted else None, min_reward, stale_over)
    listing = filters != GroupFilter() or limit is not None
    if sum((group is not None, rollout is not None, listing)) > 1:
        raise typer.BadParameter("show one group, one rollout or a list, not several of them", param_hint="--group")
    if watch and as_json:
        raise typer.BadParameter("cannot be combined with --json", param_hint="--watch")
    if rollout is not None:
        try:
            group_and_index(rollout)
        except ValueError:
            raise typer.BadParameter(
                "is a group's id and an index in it, such as 12-3", param_hint="--rollout"
            ) from None
    found = find_run(runs_dir, run)

    def look() -> Page:
        with snapshot(found.path / FILE) as connection:
            if group is not None:
                return group_page(found, connection, group)
            if rollout is not None:
                return rollout_page(found, connection, rollout)
            if listing:
                return list_page(found, connection, filters, limit or LISTED)
            return overview_page(found, connection)

    if watch:
        _watch(look)
    else:
        show(look(), as_json)


def inspect_run(run: RunName = "latest", as_json: AsJson = False, runs_dir: RunsDir = Path("runs")) -> None:
    """Show what a run was started from and what it has done: starts, failures, throughput, checkpoints, evaluations."""
    from asyncrl_cli.inspect.history_page import history_page
    from asyncrl_cli.journal.history import history
    from asyncrl_cli.journal.queries import snapshot
    from asyncrl_cli.journal.schema import FILE, JournalError
    from asyncrl_cli.runs.catalogue import find_run

    found = find_run(runs_dir, run)
    try:
        with snapshot(found.path / FILE) as connection:
            page = history_page(found, history(connection))
    except JournalError:
        show(history_page(found, None), as_json)
        raise
    show(page, as_json)


def show(page: Page, as_json: bool) -> None:
    """Print a page."""
    if as_json:
        echo_json(page.document)
    else:
        echo("\n".join(page.lines))


def _watch(look: Callable[[], Page]) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        raise typer.BadParameter("needs a terminal", param_hint="--watch")
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                # A plain Text, in which rich looks for no markup.
                live.update(Text("\n".join(look().lines)), refresh=True)
                time.sleep(WATCH_S)
        except KeyboardInterrupt:
            return


add(app, "buffer", inspect_buffer, "Show what is in a run's buffer.", "asyncrl inspect buffer latest --state running")
add(app, "run", inspect_run, "Show how a run started and what happened in it.", "asyncrl inspect run latest --json")
