"""`asyncrl runs`: all runs of a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncrl_cli.cli.arguments import RunsDir
from asyncrl_cli.cli.output import echo, echo_json

if TYPE_CHECKING:
    from asyncrl_cli.runs.directory import RunDirectory


QUIET = ("starting", "running", "finished")
"""Phases without a reason to show."""


def runs(
    runs_dir: RunsDir = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List runs, oldest first: phase, step, engines (serving/wanted), held-out accuracy, duration, `--set` values.

    A run that failed or was interrupted has the reason below it. Times are in UTC.
    """
    from asyncrl_cli.runs.catalogue import all_runs

    rows = [_row(run) for run in all_runs(runs_dir)]
    if as_json:
        echo_json(rows)
        return
    if not rows:
        echo(f"no runs in {runs_dir} yet")
        return
    header = ("run", "phase", "step", "engines", "greedy", "sampled", "took", "started", "settings")
    echo("\n".join(_lines(header, rows)))


def _lines(header: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The table, with the reason of a failure below its run."""
    from asyncrl_cli.inspect.pages import duration, paragraph, table

    cells = [
        (
            row["run"],
            row["phase"],
            f"{row['step']}/{row['steps']}",
            _engines(row),
            *(_accuracy(row["accuracy"].get(kind)) for kind in ("greedy", "sampled")),
            "-" if row["took_s"] is None else duration(row["took_s"]),
            row["started"].replace("T", " ").removesuffix("+00:00"),
            " ".join(row["settings"]),
        )
        for row in rows
    ]
    first, *lines = table(header, cells, left=(0, 1, 7, 8))
    yield first
    for row, line in zip(rows, lines, strict=True):
        yield line
        if row["reason"] and row["phase"] not in QUIET:
            reason, *_ = row["reason"].strip().splitlines() or [""]
            yield from paragraph(reason, "    ")


def _row(run: RunDirectory) -> dict[str, Any]:
    """A run's state, how long it took (None before its end is known), and the settings that its command changed."""
    manifest, state = run.manifest, run.state
    return {
        "run": run.run_id,
        "started": str(manifest.get("started", "")),
        "took_s": _seconds(str(manifest.get("started", "")), state.updated),
        "settings": _settings(manifest.get("command")),
        **asdict(state),
        "phase": run.status,
    }


def _seconds(started: str, updated: float) -> float | None:
    try:
        return max(0.0, updated - datetime.fromisoformat(started).timestamp()) if updated else None
    except ValueError:
        return None


def _settings(command: object) -> list[str]:
    """The values of ``--set`` in a command."""
    words = [str(word) for word in command] if isinstance(command, list) else []
    found = [after for word, after in pairwise(words) if word == "--set"]
    return found + [word.removeprefix("--set=") for word in words if word.startswith("--set=")]


def _engines(row: Mapping[str, Any]) -> str:
    """Engines of a run as serving/wanted; ``-`` for a run that has ended."""
    counts = row["engines"]
    return f"{counts['serving']}/{counts['wanted']}" if counts and row["phase"] in ("starting", "running") else "-"


def _accuracy(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
