"""`asyncrl scale`: how many engines a live run has."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli.cli.arguments import RunName, RunsDir
from asyncrl_cli.cli.output import echo

POLL_S = 0.5


def scale(
    run_id: RunName,
    engines: Annotated[
        int, typer.Option("--engines", metavar="N", min=1, help="Number of engines that the run should have.")
    ],
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, help="Wait up to this long for all of them to serve.")
    ] = 120.0,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Change how many engines a live run has, within the bounds of `rollout.engines` in its spec.

    An engine that leaves first returns its rollouts, and other engines continue them from their tokens. An engine that
    joins waits until Ray has room for it. If that takes longer than --wait, the command prints what is missing and
    exits with 0.
    """
    from asyncrl_cli.core.errors import ConfigError, RunError
    from asyncrl_cli.core.terminal import counted
    from asyncrl_cli.runs.catalogue import find_run
    from asyncrl_cli.runs.directory import ACTIVE
    from asyncrl_cli.runs.scaling import request_engines

    run = find_run(runs_dir, run_id)
    answer = request_engines(run, engines)
    if not answer.accepted:
        raise ConfigError(
            f"the run refuses {counted(engines, 'engine')}: {answer.message}",
            location=run.run_id,
            hint=f"other bounds need a resume: asyncrl resume {run.argument} --set "
            f"'rollout.engines={{min: 1, max: {engines}}}'",
        )
    deadline = time.monotonic() + wait
    while (serving := run.state.engines.get("serving", 0)) != engines and time.monotonic() < deadline:
        if (status := run.status) not in ACTIVE:
            raise RunError(
                f"the run ended before {counted(engines, 'engine')} served, its phase is {status}", location=run.run_id
            )
        time.sleep(POLL_S)
    now = f"{counted(serving, 'engine')} serve{'s' if serving == 1 else ''}"
    if serving == engines:
        echo(f"{run.run_id}: {now}")
    else:
        waits = run.state.engines_wait
        echo(f"{run.run_id}: accepted; {now} so far, {engines} are wanted{f' ({waits})' if waits else ''}")
