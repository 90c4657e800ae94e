"""rich's console for a run's texts. This module imports rich, so commands import it only where they need it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from asyncrl_cli.core.terminal import printable


class PlainConsole(Console):
    """Shows all text literally: markup as text, control characters as escapes. No caller can forget to escape."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The renderable's segments. rich's own cursor movements are separate segments, and are kept."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
