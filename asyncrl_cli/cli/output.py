"""Output of commands: text without control characters, valid JSON, notices of checks."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from asyncrl_cli.core.terminal import printable
from asyncrl_cli.runs.directory import DEFAULT_RUNS

if TYPE_CHECKING:
    from asyncrl_cli.checks.start import StartChecks
    from asyncrl_cli.inspect.pages import Page
    from asyncrl_cli.spec.sections import ExperimentSpec

_COMMAND = re.compile(
    r"asyncrl (?:(?:inspect|checkpoint) \w+|"
    r"resume|replay|evaluate|serve|watch|runs|track|events|staleness|report)\b(?![^`;]*(?:--runs-dir|/))"
)
"""A command about a run that names neither the folder of runs nor a path."""


def debugging() -> bool:
    """True if tracebacks are shown (`--debug` or ASYNCRL_DEBUG)."""
    return os.environ.get("ASYNCRL_DEBUG", "0") not in ("", "0")


def in_runs_dir(hint: str, runs_dir: Path | None) -> str:
    """Add --runs-dir to the commands in a hint; otherwise they would look for the run in `runs`."""
    if runs_dir is None or runs_dir.absolute() == DEFAULT_RUNS.absolute():
        return hint
    return _COMMAND.sub(lambda found: f"{found[0]} --runs-dir {shlex.quote(str(runs_dir))}", hint)


def echo(text: str, err: bool = False) -> None:
    typer.echo(printable(text), err=err)


def echo_json(value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    # Escape more than JSON requires: some characters control a terminal or cannot be encoded.
    typer.echo("".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text))


def show(page: Page, as_json: bool) -> None:
    if as_json:
        echo_json(page.document)
    else:
        echo("\n".join(page.lines))


def start_checks(
    spec: ExperimentSpec,
    search_path: Path,
    thorough: bool = False,
    references: Mapping[tuple[str, ...], str] | None = None,
    training: bool = True,
    takes_data: bool = True,
) -> StartChecks:
    """Prepare all checks of a start. Slow checks print a notice to standard error."""
    from asyncrl_cli.checks.start import StartChecks

    return StartChecks(
        spec,
        search_path=search_path,
        notice=lambda text: echo(f"! {text}", err=True),
        thorough=thorough,
        references=references,
        training=training,
        takes_data=takes_data,
    )
