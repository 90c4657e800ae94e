"""How a command prints: text that is safe on a terminal, and JSON that stays JSON."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import typer

from asyncrl_cli.core.terminal import printable

_CONTROL = re.compile("[\x7f-\x9f\ud800-\udfff]")
"""What JSON allows unescaped and a terminal acts on, or cannot encode."""


def debugging() -> bool:
    """Whether tracebacks are shown: `--debug`, or ASYNCRL_DEBUG."""
    return os.environ.get("ASYNCRL_DEBUG", "0") not in ("", "0")


def echo(text: str, err: bool = False) -> None:
    """Print text to standard output, or to standard error."""
    typer.echo(printable(text), err=err)


def echo_json(value: Any, indent: int | None = 2) -> None:
    """Print a JSON document."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    typer.echo(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text))
