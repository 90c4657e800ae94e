"""rich's console for the texts of a run. rich is imported here, so commands import this module where they need it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from asyncrl_cli.core.terminal import printable


class PlainConsole(Console):
    """Shows every text literally: markup is text, and a control character is shown as an escape.

    This holds for everything that it draws, so no caller can forget it.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The renderable's segments. rich's own movements of the cursor are separate segments, and stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
