"""A reply's text, piece by piece, while its tokens are generated.

Invariant: the pieces joined are a prefix of the reply's final text, and all of it after ``finish``. So an incomplete
character is held back, and so is text in which a stop string may begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

Kind = Literal["content", "reasoning"]

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes half a character to."""
LONGEST_CHARACTER = 4
"""Bytes, and so tokens, that a character has at most."""


class Part(NamedTuple):
    """A piece of a reply: of what it says, or of its reasoning."""

    kind: Kind
    text: str


class TextStream:
    """Turns tokens into pieces of text."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[str], on_text: Callable[[str], None]
    ) -> None:
        self._decode = decode
        self._stop = stop
        self._on_text = on_text
        self._ids: list[int] = []
        # Up to _settled the text is known; from _context on tokens are decoded with those after them, as a tokenizer
        # may drop a space at the beginning of what it decodes.
        self._context = self._settled = 0
        self._text = ""
        self._sent = 0

    def feed(self, ids: Sequence[int]) -> None:
        """The next tokens."""
        self._ids += ids
        known = self._decode(self._ids[self._context : self._settled])
        text = self._decode(self._ids[self._context :])
        end = len(self._ids)
        if text.endswith(INCOMPLETE):
            if end - self._settled <= 2 * LONGEST_CHARACTER:
                return
            # Not half a character, but bytes that are none. Without this, all of them would be decoded each time.
            end, whole = end - LONGEST_CHARACTER, text
            text = self._decode(self._ids[self._context : end])
            if not whole.startswith(text):
                return
        if not text.startswith(known):
            return
        self._text += text[len(known) :]
        self._context, self._settled = self._settled, end
        self._send(self._safe())

    def finish(self, text: str) -> None:
        """Send what is missing of the reply's final text."""
        if text.startswith(self._text[: self._sent]):
            self._text = text
            self._send(len(text))

    def _safe(self) -> int:
        """How much of the text may be sent: up to a stop string, or to what may be the beginning of one."""
        ends = [len(self._text)]
        for stop in self._stop:
            at = self._text.find(stop)
            if at >= 0:
                ends.append(at)
                continue
            ends.append(len(self._text) - overlap(self._text, [stop]))
        return min(ends)

    def _send(self, end: int) -> None:
        if end > self._sent:
            piece, self._sent = self._text[self._sent : end], end
            self._on_text(piece)


def overlap(text: str, marks: Iterable[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
