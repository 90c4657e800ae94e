"""`asyncrl staleness`: how stale a run's training was, whether the bound held, and what another bound would cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli.cli.arguments import AsJson, RunName, RunsDir
from asyncrl_cli.cli.inspect import show


def staleness(
    run: RunName = "latest",
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="all", help="`all`: a row for every step, not for ranges of them.")
    ] = None,
    what_if: Annotated[
        int | None,
        typer.Option(
            "--what-if",
            metavar="S",
            min=0,
            help="Estimate how long the run would have taken with this bound: a range, and what it assumes.",
        ),
    ] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show by how many weight versions training lagged behind, and prove from the journal that the bound held.

    Ends with 0 when it held and with 1 when rows of the journal break it. Groups trained late with `on_stale: train`
    are counted and break nothing. Steps count from 1, as in metrics.jsonl.
    """
    from asyncrl_cli.core.errors import RunError
    from asyncrl_cli.inspect.staleness_page import staleness_page, with_what_if
    from asyncrl_cli.inspect.what_if import workload
    from asyncrl_cli.journal.queries import snapshot
    from asyncrl_cli.journal.schema import FILE
    from asyncrl_cli.journal.staleness import staleness_report
    from asyncrl_cli.journal.step_timeline import recording
    from asyncrl_cli.runs.catalogue import find_run

    if steps not in (None, "all"):
        raise typer.BadParameter("is `all`, or left out", param_hint="--steps")
    found = find_run(runs_dir, run)
    with snapshot(found.path / FILE) as connection:
        report = staleness_report(connection)
        recorded = recording(connection) if what_if is not None else None
    page = staleness_page(found, report, every_step=steps == "all")
    if recorded is not None and what_if is not None:
        try:
            work = workload(recorded)
        except ValueError as error:
            hint = "--what-if goes by the times of trained steps"
            raise RunError(str(error), location=found.run_id, hint=hint) from None
        page = with_what_if(page, report, work, what_if)
    show(page, as_json)
    if report.violations:
        raise typer.Exit(1)
