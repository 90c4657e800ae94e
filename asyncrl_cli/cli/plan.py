"""`asyncrl plan`: the step time of a spec, before it is paid for. Needs neither Ray nor torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.cli.arguments import AsJson, Overrides, RunsDir, run_names
from asyncrl_cli.cli.output import echo, echo_json

if TYPE_CHECKING:
    from asyncrl_cli.inspect.pages import Page
    from asyncrl_cli.plan.comparison import Line
    from asyncrl_cli.plan.from_journal import Calibration
    from asyncrl_cli.plan.simulator import Outcome, Scenario
    from asyncrl_cli.runs.directory import RunDirectory
    from asyncrl_cli.spec.sections import ExperimentSpec


def plan(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="The YAML spec.")],
    overrides: Overrides = None,
    calibrate_from: Annotated[
        str | None,
        typer.Option(
            "--calibrate-from",
            metavar="RUN",
            help="Measure engines, trainer and lengths in this run.",
            autocompletion=run_names,
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="RUN",
            help="Print the prediction beside what this run measured.",
            autocompletion=run_names,
        ),
    ] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Predict a spec's step time, what each side waits for, and how stale groups will be.

    A run is simulated with the ledger that decides in a real one (docs/planning.md). Exit code: 0 with a prediction, 2
    when there is nothing to predict from, or when the run that was measured is itself not reproduced within 10 %.
    """
    from asyncrl_cli.inspect.plan_page import calibration_page, plan_page
    from asyncrl_cli.orchestrator.actors import buffer_settings
    from asyncrl_cli.plan.prediction import predict
    from asyncrl_cli.plan.scenario import planned_scenario, shares_host
    from asyncrl_cli.runs.catalogue import find_run
    from asyncrl_cli.spec.load import load_recorded, load_spec

    if calibrate_from is None:
        raise typer.BadParameter("name a run to measure", param_hint="--calibrate-from")
    loaded = load_spec(spec, overrides or ())
    run = find_run(runs_dir, calibrate_from)
    before = load_recorded(run.path).spec
    measured = measure(run, before)
    lines = reproduced(run, measured)
    planned = planned_scenario(loaded.spec, buffer_settings(loaded.spec), measured, before)
    predicted = predict(planned.scenario, loaded.spec.rollout.max_response_tokens, not shares_host(loaded.spec))
    pages = {
        "calibration": calibration_page(run.run_id, measured, lines),
        "plan": plan_page(f"{loaded.spec.name}, predicted", predicted, planned.scenario, planned.guesses),
    }
    if compare is not None:
        pages["comparison"] = compared(find_run(runs_dir, compare), planned.scenario, predicted.outcome)
    show(pages, as_json)


def measure(run: RunDirectory, spec: ExperimentSpec) -> Calibration:
    """What a run's journal says of lengths and costs. Raises ``ConfigError`` when it says too little."""
    from asyncrl_cli.core.errors import ConfigError
    from asyncrl_cli.journal.queries import snapshot
    from asyncrl_cli.journal.schema import FILE
    from asyncrl_cli.plan.from_journal import calibrate
    from asyncrl_cli.plan.scenario import shares_host

    with snapshot(run.path / FILE) as connection:
        try:
            return calibrate(connection, shares_host(spec))
        except ValueError as error:
            hint = "measure a run with more trained steps, and fewer evaluations and checkpoints"
            raise ConfigError(str(error), location=run.run_id, hint=hint) from None


def reproduced(run: RunDirectory, measured: Calibration) -> tuple[Line, ...]:
    """The run's own steps, simulated. Raises ``ConfigError`` when they are not what was measured."""
    from asyncrl_cli.core.errors import ConfigError
    from asyncrl_cli.inspect.plan_page import comparison_table
    from asyncrl_cli.inspect.resolved import resolved_spec
    from asyncrl_cli.inspect.what_if import what_if

    found = what_if(resolved_spec(run), measured, ())
    if found.misfit is None:
        return found.lines
    echo("\n".join(comparison_table("its own steps", found.lines)), err=True)
    raise ConfigError(
        f"the run's own steps are not reproduced within 10 %, so nothing is predicted; what fits least: {found.misfit}",
        location=run.run_id,
        hint="measure a run on a machine that nothing else uses, with more steps after its lengths have settled",
    )


def compared(run: RunDirectory, scenario: Scenario, outcome: Outcome) -> Page:
    """The prediction beside what a run measured."""
    from asyncrl_cli.inspect.plan_page import comparison_page
    from asyncrl_cli.plan.comparison import compare, error_parts
    from asyncrl_cli.spec.load import load_recorded

    happened = measure(run, load_recorded(run.path).spec)
    parts = error_parts(scenario, happened)
    return comparison_page(run.run_id, compare(outcome, happened.observed), parts, outcome.step_s + parts["together"])


def show(pages: dict[str, Page], as_json: bool) -> None:
    """Print pages, one below the other, or as one document."""
    if as_json:
        echo_json({name: page.document for name, page in pages.items()})
    else:
        echo("\n\n".join("\n".join(page.lines) for page in pages.values()))
