"""`asyncrl inspect`, `asyncrl events` and `asyncrl staleness`: views of a run's journal, without Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.cli.arguments import AsJson, Group, RunName, RunsDir, add, one_of
from asyncrl_cli.cli.output import echo, show
from asyncrl_cli.core.errors import RunError
from asyncrl_cli.core.terminal import plain_text
from asyncrl_cli.runs.catalogue import find_run

if TYPE_CHECKING:
    from asyncrl_cli.inspect.pages import Page

WATCH_S = 1.0
"""Seconds between two updates of ``--watch``."""

LISTED = 20
"""Number of groups that a list shows by default."""

app = typer.Typer(
    cls=Group, help="Look into a run that is running, stopped or dead.", no_args_is_help=True, rich_markup_mode=None
)


def _states() -> Iterable[str]:
    from asyncrl_cli.journal.queries import STATES

    return STATES


def _kinds() -> Iterable[str]:
    from asyncrl_cli.journal.events import KINDS

    return KINDS


def inspect_buffer(
    run: RunName = "latest",
    group: Annotated[
        str | None, typer.Option("--group", metavar="ID", help="Show one group, by its id or its prompt's uid.")
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
            help="List groups in this state: running, finished, taken (not trained), trained, rejected or requeued.",
        ),
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option("--min-reward", metavar="REWARD", help="List groups with at least this mean reward.")
    ] = None,
    stale_over: Annotated[
        int | None, typer.Option("--stale-over", metavar="N", help="List groups with a staleness above N versions.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help=f"List N groups, newest first. Default: {LISTED}.")
    ] = None,
    save_images: Annotated[
        Path | None,
        typer.Option("--save-images", metavar="FOLDER", help="Save the images of --group or --rollout as files."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Update every second, until Ctrl-C.")] = False,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Summarize a run's buffer, list some of its groups, or show one.

    Steps count from 1, as in metrics.jsonl. The staleness of a group that is not taken yet is calculated as if it were
    taken now.
    """
    from asyncrl_cli.inspect.buffer_pages import group_page, list_page, overview_page, rollout_page
    from asyncrl_cli.journal.queries import STATES, GroupFilter, snapshot
    from asyncrl_cli.journal.schema import FILE
    from asyncrl_cli.records.generation import group_and_index

    wanted = next((at for at in STATES if at == state), None)
    if wanted != state:
        raise typer.BadParameter(f"unknown state; known: {', '.join(STATES)}", param_hint="--state")
    filters = GroupFilter(wanted, min_reward, stale_over)
    listing = filters != GroupFilter() or limit is not None
    if sum((group is not None, rollout is not None, listing)) > 1:
        raise typer.BadParameter("show one group, one rollout or a list, not several of them", param_hint="--group")
    if watch and as_json:
        raise typer.BadParameter("cannot be combined with --json", param_hint="--watch")
    if save_images is not None and group is None and rollout is None:
        raise typer.BadParameter("give --group or --rollout, too", param_hint="--save-images")
    if rollout is not None:
        try:
            group_and_index(rollout)
        except ValueError:
            raise typer.BadParameter(
                "not a group's id and an index in it, such as 12-3", param_hint="--rollout"
            ) from None
    found = find_run(runs_dir, run)

    def look() -> Page:
        with snapshot(found.path / FILE) as connection:
            if group is not None:
                return group_page(found, connection, group, save_images)
            if rollout is not None:
                return rollout_page(found, connection, rollout, save_images)
            if listing:
                return list_page(found, connection=connection, wanted=filters, limit=limit or LISTED)
            return overview_page(found, connection)

    if watch:
        _watch(look)
    else:
        show(look(), as_json)


def inspect_run(run: RunName = "latest", as_json: AsJson = False, runs_dir: RunsDir = Path("runs")) -> None:
    """Show a run's health and history: starts, failures, throughput, checkpoints, evaluations."""
    from asyncrl_cli.inspect.health import health
    from asyncrl_cli.inspect.history_page import history_page
    from asyncrl_cli.inspect.resolved import resolved_spec
    from asyncrl_cli.journal.history import history, metrics_rows
    from asyncrl_cli.journal.queries import snapshot
    from asyncrl_cli.journal.schema import FILE, JournalError

    found = find_run(runs_dir, run)
    try:
        with snapshot(found.path / FILE) as connection:
            findings = health(metrics_rows(connection), resolved_spec(found))
            page = history_page(found, history(connection), findings)
    except JournalError:
        show(history_page(found, None), as_json)
        raise
    show(page, as_json)


def events(
    run: RunName = "latest",
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            metavar="KIND",
            autocompletion=one_of(_kinds),
            help="Only events of this kind: {names}. May be repeated.",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Also print new events, until the run ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Print a run's events in order of time. The run may be running, stopped or dead.

    docs/journal.md explains each kind.
    """
    from asyncrl_cli.inspect.history_page import as_json as json_line
    from asyncrl_cli.inspect.history_page import as_line, run_events
    from asyncrl_cli.journal.events import KINDS

    for name in kind or ():
        if name not in KINDS:
            raise typer.BadParameter(f"unknown kind {name!r}; known: {', '.join(KINDS)}", param_hint="--kind")
    shown = json_line if as_json else as_line
    for event in run_events(find_run(runs_dir, run), kind or (), follow):
        echo(shown(event))


def staleness(
    run: RunName = "latest",
    what_if: Annotated[
        int | None, typer.Option("--what-if", metavar="S", min=0, help="Estimate the time of a step with this bound.")
    ] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show the staleness of every trained group, and verify from the journal that it stayed within the bound.

    Exit code: 0 when it did, 1 when rows of the journal violate the bound. Groups that `on_stale: train` trained late
    are counted, but are not violations. Steps count from 1, as in metrics.jsonl; --json has every step.
    """
    from asyncrl_cli.inspect.health import health
    from asyncrl_cli.inspect.resolved import resolved_spec
    from asyncrl_cli.inspect.staleness_page import staleness_page, with_what_if
    from asyncrl_cli.inspect.what_if import no_advice, reproduced_from
    from asyncrl_cli.journal.history import metrics_rows
    from asyncrl_cli.journal.queries import snapshot
    from asyncrl_cli.journal.schema import FILE
    from asyncrl_cli.journal.staleness import staleness_report

    found = find_run(runs_dir, run)
    with snapshot(found.path / FILE) as connection:
        report = staleness_report(connection)
        page, spec = staleness_page(found, report), resolved_spec(found)
        if what_if is not None:
            try:
                recorded = reproduced_from(connection, spec)
            except ValueError as error:
                hint = "--what-if needs the times of trained steps"
                raise RunError(str(error), location=found.run_id, hint=hint) from None
            page = with_what_if(page, recorded, what_if, no_advice(health(metrics_rows(connection), spec)))
    show(page, as_json)
    if report.violations:
        raise typer.Exit(1)


def _watch(look: Callable[[], Page]) -> None:
    from rich.live import Live

    from asyncrl_cli.core.console import PlainConsole

    console = PlainConsole()
    if not console.is_terminal:
        raise typer.BadParameter("needs a terminal", param_hint="--watch")
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(plain_text("\n".join(look().lines)), refresh=True)
                time.sleep(WATCH_S)
        except KeyboardInterrupt:
            return


add(
    app,
    ("buffer", inspect_buffer, "Show what is in a run's buffer.", "inspect buffer latest --state running"),
    ("run", inspect_run, "Show how a run started and what happened in it.", "inspect run latest --json"),
)
