"""`asyncrl plan`: predicts the step time of a spec from a measured run. Only `--calibrate` starts processes."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, lcm
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.cli.arguments import AsJson, NewRunsDir, Overrides, run_names
from asyncrl_cli.cli.output import echo, echo_json

if TYPE_CHECKING:
    from asyncrl_cli.inspect.pages import Page
    from asyncrl_cli.runs.directory import RunDirectory
    from asyncrl_cli.spec.sections import ExperimentSpec

CALIBRATION_STEPS = 10
"""Steps that `--calibrate` trains after filling the buffer three times."""


def plan(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="The YAML spec.")],
    overrides: Overrides = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure here: train a few steps with one engine and the fewest ranks.")
    ] = False,
    calibrate_from: Annotated[
        str | None,
        typer.Option(
            "--calibrate-from",
            metavar="RUN",
            help="Use the speeds and lengths that this run measured.",
            autocompletion=run_names,
        ),
    ] = None,
    as_json: AsJson = False,
    runs_dir: NewRunsDir = None,
) -> None:
    """Predict a spec's step time, the waiting time on each side, and the groups' staleness.

    The simulation uses the same ledger as a real run (docs/planning.md). Speeds and lengths come from a run
    (--calibrate-from), or from a few steps that are trained here (--calibrate). Exit code: 0 with a prediction; 2 when
    nothing is measured, or when the simulation does not reproduce the measured run within 10 %.
    """
    from asyncrl_cli.core.errors import ConfigError
    from asyncrl_cli.runs.catalogue import find_run
    from asyncrl_cli.runs.directory import DEFAULT_RUNS
    from asyncrl_cli.spec.load import load_spec

    if calibrate and calibrate_from is not None:
        raise typer.BadParameter("cannot be combined with --calibrate-from", param_hint="--calibrate")
    experiment_spec = load_spec(spec, overrides or ()).spec
    if calibrate:
        run = calibration_run(spec, overrides or (), runs_dir)
    elif calibrate_from is not None:
        run = find_run(runs_dir or DEFAULT_RUNS, calibrate_from)
    else:
        raise ConfigError(
            "nothing is measured, so nothing can be predicted",
            location="asyncrl plan",
            hint="use a run of this spec on the same kind of machine (--calibrate-from RUN), or measure (--calibrate)",
        )
    for page in (pages := predicted_pages(experiment_spec, run)).values():
        if not as_json:
            echo("\n".join((*page.lines, "")))
    if as_json:
        echo_json({name: page.document for name, page in pages.items()})


def predicted_pages(spec: ExperimentSpec, run: RunDirectory) -> dict[str, Page]:
    """Return the measurements of a run, and the prediction for a spec from them.

    Raises ``ConfigError`` if the simulation does not reproduce the measured run, or if that run's measurements do not
    hold for the spec.
    """
    from asyncrl_cli.core.errors import ConfigError
    from asyncrl_cli.inspect.health import health
    from asyncrl_cli.inspect.plan_page import calibration_page, comparison_table, plan_page
    from asyncrl_cli.inspect.reproduction import no_advice, reproduced
    from asyncrl_cli.inspect.resolved import resolved_spec
    from asyncrl_cli.journal.history import metrics_rows
    from asyncrl_cli.journal.queries import snapshot
    from asyncrl_cli.journal.schema import FILE
    from asyncrl_cli.plan.from_journal import calibrate
    from asyncrl_cli.plan.prediction import predict
    from asyncrl_cli.plan.scenario import planned_scenario, shares_host
    from asyncrl_cli.records.groups import BufferSettings
    from asyncrl_cli.spec.load import load_recorded

    measured_spec = load_recorded(run.path).spec
    with snapshot(run.path / FILE) as connection:
        reason = no_advice(health(metrics_rows(connection), resolved_spec(run)))
        try:
            calibration = calibrate(connection, shares_host(measured_spec))
        except ValueError as error:
            hint = "measure a run with more trained steps, and fewer evaluations and checkpoints"
            raise ConfigError(str(error), location=run.run_id, hint=hint) from None
    reproduction = reproduced(resolved_spec(run), calibration)
    if not reproduction.fits:
        echo("\n".join(comparison_table("its own steps", reproduction.lines)), err=True)
        raise ConfigError(
            "the run's own steps are not reproduced within 10 %, so nothing is predicted",
            location=run.run_id,
            hint="measure a run on a machine that nothing else uses, with more steps after its lengths have settled",
        )
    planned_run = planned_scenario(
        spec, settings=BufferSettings.from_spec(spec), calibration=calibration, measured_spec=measured_spec
    )
    predicted = predict(planned_run.scenario, spec.rollout.max_response_tokens)
    return {
        "calibration": calibration_page(run.run_id, calibration, reproduction.lines),
        "plan": plan_page(spec.name, predicted=predicted, plan=planned_run, reason=reason),
    }


def calibration_run(path: Path, overrides: Sequence[str], runs_dir: Path | None) -> RunDirectory:
    """Train a few steps with one engine and as few trainer ranks as possible. Batches are scaled to the ranks."""
    from asyncrl_cli.cli.output import start_checks
    from asyncrl_cli.cli.running import drive
    from asyncrl_cli.orchestrator.launch import DriverStart
    from asyncrl_cli.runs.directory import RunDirectory
    from asyncrl_cli.runs.manifest import describe_start
    from asyncrl_cli.spec.load import dump_spec, load_spec

    loaded_spec = load_spec(path, [*overrides, *calibration_overrides(load_spec(path, overrides).spec)])
    steps = loaded_spec.spec.stop.total
    with start_checks(loaded_spec.spec, path.absolute().parent) as checks:
        experiment = checks.experiment()
    run = RunDirectory.create(runs_dir or loaded_spec.spec.runs_dir, f"{loaded_spec.spec.name}-calibration")
    run.begin(dump_spec(experiment.spec, loaded_spec.references), steps, describe_start(path))
    drive(experiment, run, DriverStart(), quiet=True)
    return run


def calibration_overrides(spec: ExperimentSpec) -> list[str]:
    """Return the changes to a spec for its calibration run, which ends at a version and has equal minibatches."""
    pipeline, trainer = spec.pipeline, spec.trainer
    ranks = lcm(trainer.sequence_parallel, trainer.expert_parallel)
    groups = max(2, pipeline.groups_per_step * ranks // trainer.ranks)
    versions = 3 * (pipeline.max_staleness + 2) + ceil(CALIBRATION_STEPS / pipeline.publish_every)
    return [
        "rollout.engines=1",
        f"trainer.ranks={ranks}",
        f"pipeline.groups_per_step={ceil(groups / trainer.minibatches) * trainer.minibatches}",
        f"stop.steps={versions * pipeline.publish_every}",
        "stop.epochs=null",
        "evaluation.every=0",
        "evaluation.sets={}",
        "data.eval=null",
        "checkpoints.every=0",
        "checkpoints.upload=null",
        "algorithm.critic.warmup_steps=0",
    ]
