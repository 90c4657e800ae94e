"""How commands print: text without control characters for the terminal, and valid JSON."""

from __future__ import annotations

import json
import os
from typing import Any

import typer

from asyncrl_cli.core.terminal import printable


def debugging() -> bool:
    """Whether tracebacks are shown: `--debug`, or ASYNCRL_DEBUG."""
    return os.environ.get("ASYNCRL_DEBUG", "0") not in ("", "0")


def echo(text: str, err: bool = False) -> None:
    """Print text to standard output, or to standard error."""
    typer.echo(printable(text), err=err)


def echo_json(value: Any) -> None:
    """Print a JSON document."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    # JSON's own escapes: it allows unescaped characters that control a terminal or cannot be encoded.
    typer.echo("".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text))
