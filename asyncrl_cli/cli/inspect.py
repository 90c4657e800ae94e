"""`asyncrl inspect`, `asyncrl events` and `asyncrl staleness`: views of a run's journal, without Ray."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli.cli.arguments import AsJson, Group, RunName, RunsDir, add, completion
from asyncrl_cli.cli.output import echo, show
from asyncrl_cli.runs.catalogue import find_run

LISTED = 20
"""Number of groups that a list shows by default."""

app = typer.Typer(
    cls=Group, help="Look into a run that is running, stopped or dead.", no_args_is_help=True, rich_markup_mode=None
)


def _states() -> Iterable[str]:
    from asyncrl_cli.journal.queries import STATES

    return STATES


def _kinds() -> Iterable[str]:
    from asyncrl_cli.journal.events import QUERIES

    return QUERIES


def inspect_buffer(
    run: RunName = "latest",
    group: Annotated[int | None, typer.Option("--group", metavar="ID", min=0, help="Show one group.")] = None,
    rollout: Annotated[
        str | None, typer.Option("--rollout", metavar="ID", help="Show one rollout, such as 12-3, token by token.")
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            metavar="STATE",
            autocompletion=completion(_states),
            help="List groups in this state: running, finished, taken (not trained), trained, rejected or requeued.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help=f"List N groups, newest first. Default: {LISTED}.")
    ] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Summarize a run's buffer, list some of its groups, or show one.

    Steps count from 1, as in metrics.jsonl. The staleness of a group that is not taken yet is calculated as if it were
    taken now.
    """
    from asyncrl_cli.inspect.buffer_pages import group_page, list_page, overview_page, rollout_page
    from asyncrl_cli.journal.queries import STATES, snapshot
    from asyncrl_cli.journal.schema import FILE
    from asyncrl_cli.records.generation import group_and_index

    if state is not None and state not in STATES:
        raise typer.BadParameter(f"unknown state; known: {', '.join(STATES)}", param_hint="--state")
    is_list = state is not None or limit is not None
    if sum((group is not None, rollout is not None, is_list)) > 1:
        raise typer.BadParameter("show one group, one rollout or a list, not several of them", param_hint="--group")
    if rollout is not None:
        try:
            group_and_index(rollout)
        except ValueError:
            raise typer.BadParameter(
                "not a group's id and an index in it, such as 12-3", param_hint="--rollout"
            ) from None
    found_run = find_run(runs_dir, run)
    with snapshot(found_run.path / FILE) as connection:
        if group is not None:
            page = group_page(found_run, connection, group)
        elif rollout is not None:
            page = rollout_page(found_run, connection, rollout)
        elif is_list:
            page = list_page(found_run, connection, state, limit or LISTED)
        else:
            page = overview_page(found_run, connection)
    show(page, as_json)


def inspect_run(run: RunName = "latest", as_json: AsJson = False, runs_dir: RunsDir = Path("runs")) -> None:
    """Show a run's health and history: starts, failures, throughput, checkpoints, evaluations."""
    from asyncrl_cli.inspect.health import health
    from asyncrl_cli.inspect.history_page import history_page
    from asyncrl_cli.inspect.resolved import resolved_spec
    from asyncrl_cli.journal.history import history, metrics_rows
    from asyncrl_cli.journal.queries import snapshot
    from asyncrl_cli.journal.schema import FILE, JournalError

    found_run = find_run(runs_dir, run)
    try:
        with snapshot(found_run.path / FILE) as connection:
            findings = health(metrics_rows(connection), resolved_spec(found_run))
            page = history_page(found_run, history(connection), findings)
    except JournalError:
        show(history_page(found_run, None), as_json)
        raise
    show(page, as_json)


def events(
    run: RunName = "latest",
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            metavar="KIND",
            autocompletion=completion(_kinds),
            help="Only events of this kind, such as fault (docs/journal.md). May be repeated.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Print a run's events in order of time. The run may be running, stopped or dead.

    docs/journal.md explains each kind.
    """
    from asyncrl_cli.inspect.history_page import as_json as json_line
    from asyncrl_cli.inspect.history_page import as_line, run_events
    from asyncrl_cli.journal.events import QUERIES

    for name in kind or ():
        if name not in QUERIES:
            raise typer.BadParameter(f"unknown kind {name!r}; known: {', '.join(QUERIES)}", param_hint="--kind")
    for event in run_events(find_run(runs_dir, run), kind or ()):
        echo(json_line(event) if as_json else as_line(event))


def staleness(
    run: RunName = "latest",
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show the staleness of every trained group, and verify from the journal that it stayed within the bound.

    Exit code: 0 when it did, 1 when rows of the journal violate the bound. Groups that `on_stale: train` trained late
    are counted, but are not violations. Steps count from 1, as in metrics.jsonl; --json has every step.
    """
    from asyncrl_cli.inspect.staleness_page import staleness_page
    from asyncrl_cli.journal.queries import snapshot
    from asyncrl_cli.journal.schema import FILE
    from asyncrl_cli.journal.staleness import staleness_report

    found_run = find_run(runs_dir, run)
    with snapshot(found_run.path / FILE) as connection:
        report = staleness_report(connection)
    show(staleness_page(found_run, report), as_json)
    if report.violations:
        raise typer.Exit(1)


add(
    app,
    ("buffer", inspect_buffer, "Show what is in a run's buffer.", "inspect buffer latest --state running"),
    ("run", inspect_run, "Show how a run started and what happened in it.", "inspect run latest --json"),
)
