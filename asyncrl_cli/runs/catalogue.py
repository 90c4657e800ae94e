"""Finds runs: all of them, the newest, or the run with a given id or prefix of it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from asyncrl_cli.core.errors import RunArgumentError
from asyncrl_cli.runs.directory import DEFAULT_RUNS, RunDirectory


def all_runs(runs_dir: Path) -> list[RunDirectory]:
    """Every run in the folder, oldest first.

    Raises ``RunArgumentError`` if there is no such folder, except for ``runs``.
    """
    if not runs_dir.is_dir():
        if runs_dir == DEFAULT_RUNS and not runs_dir.exists():
            return []
        problem = "not a folder" if runs_dir.exists() else "no such folder"
        hint = "give the folder that contains all runs with --runs-dir"
        raise RunArgumentError(problem, location=str(runs_dir), hint=hint)
    runs = [RunDirectory(path) for path in runs_dir.iterdir() if (path / "manifest.json").is_file()]
    # By the recorded start, not by the file's time: a copied folder has new files.
    return sorted(runs, key=lambda run: (str(run.manifest.get("started", "")), run.run_id))


def find_run(runs_dir: Path, name: str) -> RunDirectory:
    """The run called ``name``: an id, a unique prefix of it, ``latest``, or the path of a run's folder.

    Raises ``RunArgumentError`` if no run or several match.
    """
    with suppress(OSError):  # not a path: too long, for example
        if (Path(name) / "manifest.json").is_file():
            return RunDirectory(Path(name).absolute())
    runs = all_runs(runs_dir)
    if name == "latest":
        if not runs:
            raise RunArgumentError("there is no run yet", location=str(runs_dir), hint="start one: asyncrl train SPEC")
        return runs[-1]
    matching = [run for run in runs if run.run_id == name] or [run for run in runs if run.run_id.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        listing = ", ".join(run.run_id for run in matching)
        raise RunArgumentError(
            f"{name!r} matches {len(matching)} runs: {listing}", hint="give more characters of the id"
        )
    raise RunArgumentError(f"no run is called {name!r}", location=str(runs_dir), hint="list the runs: asyncrl runs")
