"""`asyncrl resume`: continue a run that was stopped or died."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli.cli.arguments import RunName, RunsDir, Step
from asyncrl_cli.cli.output import echo
from asyncrl_cli.cli.running import Quiet


def resume(
    run_id: RunName,
    steps: Annotated[
        int | None,
        typer.Option("--steps", metavar="STEPS", min=1, help="Train to this step."),
    ] = None,
    step: Step = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key that may change in a resumed run."),
    ] = None,
    without_journal: Annotated[
        bool, typer.Option("--without-journal", help="Move a damaged journal away; continue from a checkpoint.")
    ] = False,
    accept_changed_data: Annotated[
        bool, typer.Option("--accept-changed-data", help="Continue although the training data has changed.")
    ] = False,
    runs_dir: RunsDir = Path("runs"),
    quiet: Quiet = False,
) -> None:
    """Continue a run from where it stopped.

    The trainer starts from the newest checkpoint (or the initial model) and trains the batches recorded since then
    again; unfinished rollouts continue from their recorded tokens. Exit codes are those of `asyncrl train`.
    """
    from asyncrl_cli.cli.running import drive, refusing, search_path, start_checks
    from asyncrl_cli.runs.catalogue import find_run
    from asyncrl_cli.spec.changes import check_changes, kept_horizon
    from asyncrl_cli.spec.load import dump_spec, load_recorded

    with refusing():
        run = find_run(runs_dir, run_id)
        run.lock()
        changes = [*(overrides or ()), *([f"stop.steps={steps}"] if steps else [])]
        before = load_recorded(run.path).spec
        loaded = load_recorded(run.path, changes)
        changed = check_changes(before, loaded.spec, loaded.references)
        horizon = kept_horizon(before, loaded.spec)
        if horizon is not None:
            loaded = load_recorded(run.path, [*changes, f"trainer.schedule.steps={horizon}"])
        spec = loaded.spec

        from asyncrl_cli.orchestrator.resume import check_data, prepare

        plan = prepare(run, spec, step, ", ".join(changed), without_journal)
        with start_checks(spec, search_path(run)) as checks:
            experiment = checks.experiment()
        check_data(run, experiment, plan, accept_changed_data)
    start = plan.carry_out(run, accept_changed_data)  # until here, nothing has changed on disk
    if start.note != plan.start.note:
        echo(f"{run.run_id}: {start.note}", err=True)
    if horizon is not None:
        text = f"the learning rate's {spec.trainer.schedule.kind} schedule still spans {horizon} steps"
        echo(f"{run.run_id}: {text}; change trainer.schedule.steps to stretch it", err=True)
    run.begin(dump_spec(spec, loaded.references), spec.stop.steps)
    drive(experiment, run, start, quiet)
