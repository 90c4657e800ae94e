"""Arguments and options that several commands share, with their completion in the shell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer


def run_names(context: typer.Context, incomplete: str) -> list[str]:
    """The ids of the runs in ``--runs-dir`` that begin with what was typed."""
    from asyncrl_cli.runs.catalogue import all_runs

    runs_dir = Path(context.params.get("runs_dir") or "runs")
    names = [run.run_id for run in all_runs(runs_dir)] if runs_dir.is_dir() else []
    return [name for name in names if name.startswith(incomplete)]


def one_of(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """A completion from names that are looked up when somebody asks."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def checkpoint_steps(context: typer.Context, incomplete: str) -> list[str]:
    """The steps of the checkpoints of the run that the command line names."""
    from asyncrl_cli.core.errors import UserError
    from asyncrl_cli.runs.catalogue import find_run
    from asyncrl_cli.runs.checkpoints import complete_checkpoints

    values = context.params
    name = values.get("run") or values.get("run_id") or values.get("target") or "latest"
    try:
        run = find_run(Path(values.get("runs_dir") or "runs"), str(name))
    except UserError:  # a completion has nobody to report to
        return []
    steps = (str(checkpoint.step) for checkpoint in complete_checkpoints(run.path / "checkpoints"))
    return [step for step in steps if step.startswith(incomplete)]


RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run id, a unique prefix of one, `latest`, or a path.", autocompletion=run_names
    ),
]
RunsDir = Annotated[Path, typer.Option("--runs-dir", metavar="DIR", help="The folder of all runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key; may be repeated.")
]
Step = Annotated[
    int | None,
    typer.Option(
        "--step",
        metavar="STEP",
        min=0,
        help="Use the checkpoint of this step.",
        autocompletion=checkpoint_steps,
    ),
]
