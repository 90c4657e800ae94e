"""Send a reply's message part by part, while its tokens are generated.

Invariants:

* The pieces of ``TextStream``, joined, are a prefix of the reply's final text. So it holds back an incomplete
  character, and text that may begin a stop string.
* The parts of ``FieldStream``, joined by kind, are a prefix of the message's field, and the whole field after
  ``finish``. Reasoning comes before content, and content before tool calls, which the answer renders at the end. So the
  stream sends no text that may begin or follow a call (``parsers.LAYOUTS``), and it sends spaces only with the text
  after them, because parsers strip the spaces before a call.
* Reasoning is found in one pass over the text, in pieces of any size. So a stream divides a reply in the same way as a
  complete answer, and only the marks themselves are lost (decision 0017).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from asyncrl_cli.records.prompt import Message

Kind = Literal["content", "reasoning"]

FIELDS: dict[Kind, str] = {"reasoning": "reasoning_content", "content": "content"}
"""The message's key for each kind, in the order of a reply."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""A tokenizer decodes an incomplete character to this."""
LONGEST_CHARACTER = 4
"""Maximal number of bytes, and so of tokens, in a character."""


class Part(NamedTuple):
    """A piece of a reply's content or reasoning."""

    kind: Kind
    text: str


class TextStream:
    """Turns tokens into pieces of text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._decode = decode
        self._stop = stop
        self._ids: list[int] = []
        # Tokens before _settled have been turned into text. New tokens are decoded together with the tokens from
        # _context on, because a tokenizer may drop a space at the beginning.
        self._context = self._settled = 0
        self._text = ""
        self._sent = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text that has become certain."""
        self._ids += ids
        known = self._decode(self._ids[self._context : self._settled])
        text = self._decode(self._ids[self._context :])
        end = len(self._ids)
        if text.endswith(INCOMPLETE):
            if end - self._settled <= 2 * LONGEST_CHARACTER:
                return ""
            # These bytes are no character at all. Without this, all of them would be decoded again each time.
            end, whole = end - LONGEST_CHARACTER, text
            text = self._decode(self._ids[self._context : end])
            if not whole.startswith(text):
                return ""
        if not text.startswith(known):
            return ""
        self._text += text[len(known) :]
        self._context, self._settled = self._settled, end
        # Up to a stop string, or to text that may begin one.
        found = [at for stop in self._stop if (at := self._text.find(stop)) >= 0]
        until = min(found, default=len(self._text) - overlap(self._text, self._stop))
        start, self._sent = self._sent, max(self._sent, until)
        return self._text[start : self._sent]


def overlap(text: str, marks: Iterable[str]) -> int:
    """Number of characters at the end of a text that may begin a mark."""
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)


@dataclass(frozen=True, slots=True)
class Form:
    """The marks around reasoning at the beginning of a reply.

    Args:
        opening: begins the reasoning, unless the prompt ends with it. Within the reasoning it is dropped.
        closing: ends the reasoning. A reply without it is reasoning only.
        call: the marks around a tool call; the first of them also ends the reasoning. Empty: calls are reasoning.
        once: only the first ``closing`` is a mark, and later ones are content. Otherwise all are dropped.
    """

    opening: str
    closing: str
    call: tuple[str, ...] = ()
    once: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return self.opening, self.closing, *self.call

    def closed_in(self, prompt: str) -> bool:
        """True if the end of a prompt closes the reasoning already, as templates do that turn reasoning off."""
        return prompt.rfind(self.closing) > prompt.rfind(self.opening)


class Division:
    """Divides a text that arrives in pieces into reasoning and content."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._kind: Kind = "reasoning"
        self._rest = ""

    def feed(self, text: str) -> Iterator[Part]:
        """Yield the parts that have become certain. Text that may begin a mark waits for the next piece."""
        self._rest += text
        while found := min(((self._rest.find(mark), mark) for mark in self._marks if mark in self._rest), default=None):
            at, mark = found
            yield from self._take(at)
            if self._kind == "reasoning" and mark != self._form.opening:
                self._kind = "content"
            if mark in self._form.call:
                yield from self._take(len(mark))
            else:
                self._rest = self._rest[len(mark) :]
        yield from self._take(len(self._rest) - overlap(self._rest, self._marks))

    def finish(self) -> Iterator[Part]:
        """Yield the rest at the end of the text."""
        yield from self._take(len(self._rest))

    @property
    def _marks(self) -> tuple[str, ...]:
        if self._kind == "reasoning":
            return self._form.opening, self._form.closing, *self._form.call[:1]
        return () if self._form.once else (self._form.closing,)

    def _take(self, end: int) -> Iterator[Part]:
        text, self._rest = self._rest[:end], self._rest[end:]
        if text:
            yield Part(self._kind, text)


def divided(text: str, form: Form) -> tuple[str, str]:
    """The reasoning and the content of a reply."""
    division = Division(form)
    parts = [*division.feed(text), *division.finish()]
    reasoning, content = (
        "".join(part.text for part in parts if part.kind == kind) for kind in ("reasoning", "content")
    )
    return reasoning, content


class FieldStream:
    """Turns tokens into parts of a message."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        readable: Callable[[Sequence[int]], tuple[Sequence[int], bool]],
        stop: Sequence[str],
        *,
        form: Form | None = None,
        calls: tuple[str, ...] | None = (),
        held: bool = False,
    ) -> None:
        """``readable`` filters new tokens: it returns the visible ones, and True if nothing may be sent after them.
        ``form``: the marks around reasoning, if any. ``calls``: texts that may end the content; None if they are
        unknown, so content is sent by ``finish``. ``held``: nothing is sent before ``finish``."""
        self._readable = readable
        self._text = TextStream(decode, stop)
        self._division = Division(form) if form else None
        self._calls = calls
        self._held = held
        self._content_held = calls is None
        self._rest = ""
        self._sent: dict[Kind, str] = {}

    def feed(self, ids: Sequence[int]) -> list[Part]:
        """Take the next tokens; returns the parts that have become certain."""
        if self._held:
            return []
        ids, last = self._readable(ids)
        self._held = last
        text = self._text.feed(ids)
        parts = self._division.feed(text) if self._division else [Part("content", text)]
        certain = [
            part if part.kind == "reasoning" else Part("content", self._before_calls(part.text)) for part in parts
        ]
        return self._sending(certain)

    def finish(self, message: Message) -> list[Part]:
        """Return the parts of the message that have not been sent."""
        parts = []
        for kind, name in FIELDS.items():
            final = message.get(name) or ""
            if final.startswith(sent := self._sent.get(kind, "")):
                parts.append(Part(kind, final[len(sent) :]))
        return self._sending(parts)

    def _before_calls(self, text: str) -> str:
        """Take more text; returns the content that certainly comes before any call."""
        if self._content_held or self._calls is None:
            return ""
        text = self._rest + text
        found = [at for mark in self._calls if (at := text.find(mark)) >= 0]
        self._content_held = bool(found)
        end = min(found, default=len(text) - overlap(text, self._calls))
        if self._calls:
            end = len(text[:end].rstrip())
        self._rest = text[end:]
        return text[:end]

    def _sending(self, parts: Iterable[Part]) -> list[Part]:
        parts = [part for part in parts if part.text]
        for part in parts:
            self._sent[part.kind] = self._sent.get(part.kind, "") + part.text
        return parts
