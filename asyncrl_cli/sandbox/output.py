"""What a command prints: its beginning and its end, in memory of a fixed size, however much it is."""

from __future__ import annotations

KEPT = 2**15
"""Bytes that are kept of the beginning, and of the end."""


class Output:
    """Collects what a command prints."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self.first, self.last = b"", b""
        self.total = 0
        """Bytes that have been printed."""

    def add(self, piece: bytes) -> None:
        """The next bytes."""
        self.total += len(piece)
        missing = self._kept - len(self.first)
        if missing > 0:
            self.first += piece[:missing]
            piece = piece[missing:]
        self.last = (self.last + piece)[-self._kept :] if piece else self.last


def text_of(first: bytes, last: bytes, total: int) -> str:
    """As text, with a line in the middle that says how many bytes are omitted, if any are.

    Characters that are cut there are omitted whole; bytes that are not UTF-8 become U+FFFD.
    """
    omitted = total - len(first) - len(last)
    if omitted <= 0:
        return (first + last).decode(errors="replace")
    begins = _without_cut_end(first)
    ends = last.lstrip(bytes(range(0x80, 0xC0)))
    omitted += len(first) - len(begins) + len(last) - len(ends)
    return f"{begins.decode(errors='replace')}\n[{omitted} bytes omitted]\n{ends.decode(errors='replace')}"


def _without_cut_end(data: bytes) -> bytes:
    """Without the last character, if it is not complete."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if length > back else data
        if byte < 0x80:
            break
    return data
