"""`asyncrl runs`: all runs of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncrl_cli.cli.arguments import RunsDir
from asyncrl_cli.cli.output import echo, echo_json

if TYPE_CHECKING:
    from asyncrl_cli.runs.directory import RunDirectory


def runs(
    runs_dir: RunsDir = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List runs, oldest first, with their phase, step, engines (serving/wanted) and held-out accuracy."""
    from asyncrl_cli.runs.catalogue import all_runs

    rows = [_row(run) for run in all_runs(runs_dir)]
    if as_json:
        echo_json(rows)
        return
    if not rows:
        echo(f"no runs in {runs_dir} yet")
        return
    width = max(len(row["run"]) for row in rows)
    echo(f"{'run':{width}}  {'phase':11}  {'step':>9}  {'engines':>7}  {'greedy':>6}  {'sampled':>7}  started")
    for row in rows:
        step = f"{row['step']}/{row['steps']}"
        greedy, sampled = (_accuracy(row["accuracy"].get(kind)) for kind in ("greedy", "sampled"))
        facts = f"{step:>9}  {_engines(row):>7}  {greedy:>6}  {sampled:>7}"
        echo(f"{row['run']:{width}}  {row['phase']:11}  {facts}  {row['started']}")


def _row(run: RunDirectory) -> dict[str, Any]:
    state = asdict(run.state) | {"phase": run.status}
    return {"run": run.run_id, "started": str(run.manifest.get("started", "")), **state}


def _engines(row: Mapping[str, Any]) -> str:
    """Engines of a run as serving/wanted; ``-`` for a run that has ended."""
    counts = row["engines"]
    return f"{counts['serving']}/{counts['wanted']}" if counts and row["phase"] in ("starting", "running") else "-"


def _accuracy(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
