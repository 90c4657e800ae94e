"""`asyncrl track`: sends the data of a run to MLflow that could not be sent during the run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli.cli.arguments import RunName, RunsDir
from asyncrl_cli.cli.output import echo
from asyncrl_cli.core.terminal import counted


def track(
    run_id: RunName = "latest",
    uri: Annotated[
        str | None, typer.Option("--uri", metavar="URI", help="The tracking URI. Default: the spec's.")
    ] = None,
    register: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The registered model that gets the final model. Default: the spec's."),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Send the data of an ended run that MLflow does not have yet.

    Nothing is sent twice. Exit code: 1 when something could not be sent; then try again later.
    """
    from asyncrl_cli.core.secrets import hide
    from asyncrl_cli.runs.catalogue import find_run
    from asyncrl_cli.spec.load import load_recorded

    run = find_run(runs_dir, run_id)
    run.lock()  # a run that is still going sends its own data
    spec = load_recorded(run.path).spec
    changes = {"uri": uri, "register_model": register}
    tracking = spec.tracking.model_copy(update={key: value for key, value in changes.items() if value})

    from asyncrl_cli.monitors.mlflow.sender import send_rest, target_of

    target = target_of(spec.model_copy(update={"tracking": tracking}))
    sender = send_rest(run, target)
    report = ", the report" if sender.reported else ""
    echo(f"sent     {counted(sender.steps, 'step')}, {counted(sender.evaluations, 'evaluation')}{report}")
    if sender.unreported:
        echo(f"report   cannot be made: {sender.unreported}")
    echo(f"to       {hide(target.uri)}")
    echo(f"MLflow   run {sender.mlflow_run_id} in experiment {tracking.experiment}")
    if target.model and sender.outbox.version:
        echo(f"model    {tracking.register_model}, version {sender.outbox.version}")
    elif register:
        echo("model    none: the run has not finished")
