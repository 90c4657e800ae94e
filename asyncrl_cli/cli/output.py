"""Output of commands: text without control characters, valid JSON, notices of checks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from asyncrl_cli.core.terminal import printable

if TYPE_CHECKING:
    from asyncrl_cli.checks.start import StartChecks
    from asyncrl_cli.inspect.pages import Page
    from asyncrl_cli.spec.sections import ExperimentSpec


def debugging() -> bool:
    """True if tracebacks are shown (`--debug` or ASYNCRL_DEBUG)."""
    return os.environ.get("ASYNCRL_DEBUG", "0") not in ("", "0")


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
