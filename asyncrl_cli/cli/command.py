"""How commands join the command line, with a line in the help of their group and an example in their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand


class Command(TyperCommand):
    """A command whose usage line reads `train SPEC`; typer's own reads `train {SPEC}`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


def add(app: typer.Typer, name: str, function: Callable[..., None], summary: str, example: str) -> None:
    """Add a command. ``summary`` has room on a terminal of 80 columns, beside the longest name: 61 characters."""
    app.command(name, cls=Command, short_help=summary, epilog=f"Example: {example}")(function)
