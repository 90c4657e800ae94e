"""Text that is safe to show on a terminal.

What a run recorded (prompts, uids, metric names, failures) comes from data, models and programs. A control character in
it could move the cursor, change the title or hide text; half a surrogate pair cannot be encoded.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with every character that is neither printable nor a line break as a Python escape."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )
