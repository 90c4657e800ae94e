"""`asyncrl replay`: train a run's recorded batches again, and compare the weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from asyncrl_cli.cli.arguments import RunName, RunsDir
from asyncrl_cli.cli.output import echo
from asyncrl_cli.core.errors import RunArgumentError
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.runs.catalogue import find_run


def replay(
    run_id: RunName = "latest",
    first_step: Annotated[int, typer.Option("--from", min=1, metavar="STEP", help="The first step to compare.")] = 1,
    last_step: Annotated[int | None, typer.Option("--to", min=1, metavar="STEP", help="The last step.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Try another objective or optimizer on the same data."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per step.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Train again from the journal, without rollout engines, and compare the weights.

    Starts from the newest checkpoint before --from, or from the initial model; after a warm start, from its result.
    Exit code: 0 when all published versions are equal, or when --set changed something; 1 when one differs.
    """
    from asyncrl_cli.cli.running import search_path
    from asyncrl_cli.runs.checkpoints import complete_checkpoints, verified_checkpoint
    from asyncrl_cli.spec.changes import check_changes
    from asyncrl_cli.spec.load import load_recorded
    from asyncrl_cli.system.logs import writable_folder

    if last_step is not None and last_step < first_step:
        raise typer.BadParameter(f"is before --from {first_step}", param_hint="--to")
    run = find_run(runs_dir, run_id)
    recorded_spec = load_recorded(run.path).spec
    spec = load_recorded(run.path, overrides or ()).spec
    changed = check_changes(recorded_spec, spec)

    from asyncrl_cli.checks.hosts import check_cluster
    from asyncrl_cli.orchestrator.cluster import Actors
    from asyncrl_cli.orchestrator.replay import ReplayedStep, ReplayPlan, changes_since, recorded_steps
    from asyncrl_cli.orchestrator.replay import replay as train_again

    recorded_count = recorded_steps(run) if spec.stop.total else 0
    end = min(last_step or recorded_count, recorded_count)
    if first_step > end:
        raise RunArgumentError(
            f"cannot replay from step {first_step}: the run has trained {counted(recorded_count, 'step')}",
            location=run.run_id,
            hint="choose an earlier step with --from",
        )
    checkpoints = complete_checkpoints(run.path / "checkpoints")
    earlier_steps = [checkpoint.step for checkpoint in checkpoints if checkpoint.step < first_step]
    checkpoint = verified_checkpoint(run, earlier_steps[-1]) if earlier_steps and not changed else None
    differing: list[int] = []
    compared = 0

    def show(step: ReplayedStep) -> None:
        nonlocal compared
        compared += step.equal is not None
        if step.equal is False:
            differing.append(step.step + 1)
        echo(json.dumps(asdict(step) | {"step": step.step + 1}) if as_json else _line(step))

    def progress(text: str) -> None:
        if not as_json:
            echo(text, err=True)

    if not as_json:
        echo(f"{'step':>6}  {'version':>7}  {'recorded loss':>13}  {'loss':>10}  {'gradient':>8}  weights")
    logs = writable_folder(run.path / "logs" / "replay")
    check_cluster(spec, actors=Actors(0, spec.trainer.ranks), folder=logs, notice=progress)
    train_again(
        ReplayPlan(
            run,
            spec=spec,
            search_path=search_path(run),
            logs=logs,
            checkpoint=checkpoint,
            first_step=first_step - 1,
            end_step=end,
        ),
        progress,
        show,
    )
    if changed:
        echo(f"replayed steps {first_step} to {end} with {', '.join(changed)}", err=as_json)
    elif differing:
        echo(f"{len(differing)} of {compared} published versions differ; the first: step {differing[0]}", err=True)
        reasons = changes_since(run, checkpoint.step if checkpoint else 0)
        for reason in reasons:
            echo(f"{reason}, and a replay uses the settings of the last start for all steps", err=True)
        if reasons:
            echo("hint: compare later steps with --from, which starts from a checkpoint before them", err=True)
        raise typer.Exit(1)
    else:
        echo(f"all {compared} published versions of steps {first_step} to {end} are equal", err=as_json)


def _line(step: Any) -> str:
    verdict = {True: "equal", False: "DIFFER", None: "not published"}[step.equal]
    values = (step.recorded_loss, step.loss, step.gradient_norm)
    recorded, loss, gradient = ("-" if value is None else f"{value:.4g}" for value in values)
    return f"{step.step + 1:>6}  {step.version:>7}  {recorded:>13}  {loss:>10}  {gradient:>8}  {verdict}"
