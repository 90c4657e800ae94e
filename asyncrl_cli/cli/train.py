"""`asyncrl train`: check a spec, then run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.cli.arguments import Overrides
from asyncrl_cli.cli.output import echo
from asyncrl_cli.cli.running import Quiet

if TYPE_CHECKING:
    from asyncrl_cli.checks.finding import Finding

CALIBRATING_STEPS = 20
"""`asyncrl plan` cannot be calibrated with a shorter run. Its machine's speed is not measured."""


def train(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="The YAML spec.")],
    overrides: Overrides = None,
    quiet: Quiet = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Make all checks of a start, print them, and start nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print the checks as JSON.")] = False,
) -> None:
    """Check the spec, start Ray, DeepSpeed and vLLM, and train to the last step.

    Exit code: 0 when the run finished; 2 when the spec cannot run here, and nothing was started; 1 when the run failed;
    130 when Ctrl-C stopped it. With --dry-run: 0 when the spec can run, 2 when it cannot.
    """
    from asyncrl_cli.spec.load import dump_spec, load_spec

    if dry_run:
        from asyncrl_cli.cli.doctor import show_findings

        if not show_findings(_findings(spec, overrides or (), as_json), "can_run", as_json):
            raise typer.Exit(2)
        return
    if as_json:
        raise typer.BadParameter("needs --dry-run", param_hint="--json")
    loaded = load_spec(spec, overrides or ())
    for problem in loaded.warnings:
        echo(str(problem), err=True)

    from asyncrl_cli.cli.running import drive, start_checks
    from asyncrl_cli.orchestrator.launch import Start
    from asyncrl_cli.plan.scenario import shares_host
    from asyncrl_cli.runs.directory import RunDirectory
    from asyncrl_cli.runs.manifest import describe_start
    from asyncrl_cli.system.processor_speed import processor_speed

    with start_checks(loaded.spec, spec.absolute().parent) as checks:
        experiment = checks.experiment()
    # Before any process of the run competes for the processors.
    speed = processor_speed() if shares_host(loaded.spec) and loaded.spec.stop.steps >= CALIBRATING_STEPS else None
    # After the checks: a spec that is refused leaves no folder behind (decision 0028).
    run = RunDirectory.create(loaded.spec.runs_dir, loaded.spec.name)
    run.begin(dump_spec(loaded.spec, loaded.references), loaded.spec.stop.steps, describe_start(spec, speed))
    drive(experiment, run, Start(), quiet)


def _findings(spec: Path, overrides: Sequence[str], as_json: bool) -> Iterator[Finding]:
    """The problems of the spec, then the findings of the start checks. Raises ``SpecError`` unless ``as_json``."""
    from asyncrl_cli.checks.finding import Finding, Status
    from asyncrl_cli.cli.running import start_checks
    from asyncrl_cli.spec.load import load_spec
    from asyncrl_cli.spec.problems import SpecError

    try:
        loaded = load_spec(spec, overrides)
    except SpecError as error:
        if not as_json:
            raise
        problems, checked = error.problems, None
    else:
        problems, checked = loaded.warnings, loaded.spec
    for problem in problems:
        status = Status.FAILURE if problem.severity == "error" else Status.WARNING
        found = str(replace(problem, hint="")).removeprefix(f"{problem.severity}: ")  # the status already shows it
        yield Finding("spec", status, found, problem.hint)
    if checked is not None:
        if not problems:
            yield Finding("spec", Status.OK, str(spec))
        with start_checks(checked, spec.absolute().parent, thorough=True, references=loaded.references) as checks:
            yield from checks.findings()
