"""`asyncrl runs` and `asyncrl track`: all runs in a folder; MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from asyncrl_cli.cli.arguments import RunName, RunsDir
from asyncrl_cli.cli.output import echo, echo_json
from asyncrl_cli.core.secrets import hide
from asyncrl_cli.inspect.pages import duration, paragraph, table
from asyncrl_cli.runs.catalogue import all_runs, find_run
from asyncrl_cli.runs.directory import ACTIVE, RunDirectory

QUIET = ("starting", "running", "finished")
"""Phases that show no reason."""


def runs(
    runs_dir: RunsDir = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List runs, oldest first: phase, step, health, engines (serving/wanted), held-out accuracy, duration, `--set`.

    The reason is below a run that failed or was interrupted. Times are in UTC.
    """
    rows = [_row(run) for run in all_runs(runs_dir)]
    if as_json:
        echo_json(rows)
        return
    if not rows:
        echo(f"no runs in {runs_dir} yet")
        return
    header = ("run", "phase", "step", "health", "engines", "greedy", "sampled", "took", "started", "settings")
    header_line, *lines = table(header, [_cells(row) for row in rows], left_aligned=(0, 1, 3, 8, 9))
    echo(header_line)
    for row, line in zip(rows, lines, strict=True):
        echo(line)
        if row["reason"] and row["phase"] not in QUIET:
            reason, *_ = row["reason"].strip().splitlines() or [""]
            echo("\n".join(paragraph(reason, "    ")))


def _row(run: RunDirectory) -> dict[str, Any]:
    """A run's state, its duration until its end or now (None if unknown), and the settings that its command changed."""
    manifest, state = run.manifest, run.state
    status, started, took_s = run.status, str(manifest.get("started", "")), None
    end_time = time.time() if status in ACTIVE else state.updated
    if status == "died":  # the state is as old as the last step, but processes wrote logs until they were killed
        end_time = max(end_time, *(log.stat().st_mtime for log in run.path.glob("logs/*")), 0.0)
    if state.updated:
        with suppress(ValueError):
            took_s = max(0.0, end_time - datetime.fromisoformat(started).timestamp())
    command = manifest.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    settings = [assignment for word, assignment in pairwise(words) if word == "--set"]
    settings += [word.removeprefix("--set=") for word in words if word.startswith("--set=")]
    return {
        "run": run.run_id,
        "started": started,
        "took_s": took_s,
        "settings": settings,
        **asdict(state),
        "phase": status,
    }


def health_text(rules: Sequence[str]) -> str:
    """The first broken rule and the number of others, or `ok`."""
    suffix = f" +{len(rules) - 1}" if len(rules) > 1 else ""
    return f"{rules[0]}{suffix}" if rules else "ok"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    engines, accuracy = row["engines"], row["accuracy"]
    return (
        row["run"],
        row["phase"],
        f"{row['step']}/{row['steps']}",
        health_text(row["findings"]) if row["step"] else "-",
        f"{engines['serving']}/{engines['wanted']}" if engines and row["phase"] in ACTIVE else "-",
        *(f"{accuracy[name]:.3f}" if name in accuracy else "-" for name in ("greedy", "sampled")),
        "-" if row["took_s"] is None else duration(row["took_s"]),
        row["started"].replace("T", " ").removesuffix("+00:00"),
        " ".join(row["settings"]),
    )


def track(
    run_id: RunName = "latest",
    uri: Annotated[
        str | None, typer.Option("--uri", metavar="URI", help="The tracking URI. Default: the spec's.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Send an ended run's data that MLflow may not have.

    Exit code: 1 when some data could not be sent; then try again later.
    """
    from importlib.util import find_spec

    from asyncrl_cli.runs.manifest import EVALUATED
    from asyncrl_cli.spec.load import load_recorded

    if find_spec("mlflow") is None:
        raise ModuleNotFoundError(name="mlflow")
    run = find_run(runs_dir, run_id)
    run.lock()  # a live run sends its own data
    spec = load_recorded(run.path).spec
    tracking = spec.tracking.model_copy(update={"uri": uri or spec.tracking.uri})
    runs = spec.runs_dir.parent if EVALUATED in run.manifest else spec.runs_dir

    from asyncrl_cli.monitors.mlflow.sender import send_rest, target_of

    target = target_of(spec.model_copy(update={"tracking": tracking, "runs_dir": runs}))
    sender = send_rest(run, target)
    echo(f"to       {hide(target.uri)}")
    echo(f"MLflow   run {sender.progress.run_id} in experiment {tracking.experiment}")
