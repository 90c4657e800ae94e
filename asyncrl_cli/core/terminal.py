"""Text that is safe to show on a terminal.

The texts that a run records (prompts, uids, metric names, failures) come from data, models and programs. Control
characters in them could move the cursor, change the title or hide text; half a surrogate pair cannot be encoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text


def printable(text: str) -> str:
    """Replace all characters except printable ones and line breaks by Python escapes."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


def plain_text(text: str = "", style: str = "") -> Text:
    """The text for rich, without markup and control characters. Use it for every text that a run records."""
    from rich.text import Text

    return Text(printable(text), style)


def counted(count: int | str, noun: str) -> str:
    """A number of things: ``1 engine``, ``2 engines``, ``1 to 2 engines``, ``2 batches``, ``2 epochs``."""
    plural = "es" if noun.endswith(("s", "x", "nch", "tch", "sh")) else "s"
    count_text = f"{count:,}" if isinstance(count, int) else count
    return f"{count_text} {noun}{'' if count_text == '1' else plural}"
