"""A reply's message, part by part, while its tokens are generated.

Invariants:

* The pieces of ``TextStream``, joined, are a prefix of the reply's final text. So an incomplete character is held back,
  and so is text in which a stop string may begin.
* The parts of ``FieldStream``, joined by kind, are a prefix of the message's field, and all of it after ``finish``.
  Reasoning comes before content, and content before the calls of tools, which ``finish`` leaves to the answer. So
  nothing is sent that may be, or may follow, the beginning of a call (``parsers.LAYOUTS``), and spaces are sent with
  the text after them: parsers strip those before a call.
* Reasoning is read in one pass over the text, which may come in pieces of any size. So the parts of a stream, joined,
  are what a complete reply is divided into, and no text is lost but the marks themselves (decision 0070).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from asyncrl_cli.records.prompt import Message

Kind = Literal["content", "reasoning"]

FIELDS: dict[Kind, str] = {"reasoning": "reasoning_content", "content": "content"}
"""The key of a message that has the parts of a kind, in the order in which they come."""
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

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._decode = decode
        self._stop = stop
        self._ids: list[int] = []
        # Up to _settled the text is known; from _context on tokens are decoded with those after them, as a tokenizer
        # may drop a space at the beginning of what it decodes.
        self._context = self._settled = 0
        self._text = ""
        self._sent = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Take the next tokens. Returns the text that is certain now."""
        self._ids += ids
        known = self._decode(self._ids[self._context : self._settled])
        text = self._decode(self._ids[self._context :])
        end = len(self._ids)
        if text.endswith(INCOMPLETE):
            if end - self._settled <= 2 * LONGEST_CHARACTER:
                return ""
            # Not half a character, but bytes that are none. Without this, all of them would be decoded each time.
            end, whole = end - LONGEST_CHARACTER, text
            text = self._decode(self._ids[self._context : end])
            if not whole.startswith(text):
                return ""
        if not text.startswith(known):
            return ""
        self._text += text[len(known) :]
        self._context, self._settled = self._settled, end
        # Up to a stop string, or to what may be the beginning of one.
        found = [at for stop in self._stop if (at := self._text.find(stop)) >= 0]
        until = min(found, default=len(self._text) - overlap(self._text, self._stop))
        start, self._sent = self._sent, max(self._sent, until)
        return self._text[start : self._sent]


def overlap(text: str, marks: Iterable[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)


@dataclass(frozen=True, slots=True)
class Form:
    """Reasoning between two marks, at the beginning of a reply.

    Args:
        opening: begins it, unless the prompt ends with it. In the reasoning it is dropped.
        closing: ends it. A reply without it is reasoning alone.
        call: the texts around a tool call; the first of them ends the reasoning, too. Empty: a call is reasoning.
        once: only the first ``closing`` is a mark, and later ones are text of the content; else all are dropped.
    """

    opening: str
    closing: str
    call: tuple[str, ...] = ()
    once: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that mean something."""
        return self.opening, self.closing, *self.call

    def closed_in(self, prompt: str) -> bool:
        """Whether the end of a prompt has the reasoning already, as templates write it that turn reasoning off."""
        return prompt.rfind(self.closing) > prompt.rfind(self.opening)


class Division:
    """Divides a text that comes in pieces into reasoning and content."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._kind: Kind = "reasoning"
        self._rest = ""

    def feed(self, text: str) -> Iterator[Part]:
        """The parts that are certain. What may be the beginning of a mark waits for the next piece."""
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
        """The part that is left when nothing follows."""
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
    """Turns tokens into parts of the message."""

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
        """``readable``: filter new tokens; returns the visible ones, and whether nothing can be sent after them.
        ``form``: the form of the reasoning, if there is any. ``calls``: the texts at which the content may end; None:
        they are not known, so content comes at the end. ``held``: nothing is sent before ``finish``."""
        self._readable = readable
        self._text = TextStream(decode, stop)
        self._division = Division(form) if form else None
        self._calls = calls
        self._held = held
        self._content_held = calls is None
        self._rest = ""
        self._sent: dict[Kind, str] = {}

    def feed(self, ids: Sequence[int]) -> list[Part]:
        """Take the next tokens. Returns the parts that are certain now."""
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
        """The parts that are missing of the message."""
        parts = []
        for kind, name in FIELDS.items():
            final = message.get(name) or ""
            if final.startswith(sent := self._sent.get(kind, "")):
                parts.append(Part(kind, final[len(sent) :]))
        return self._sending(parts)

    def _before_calls(self, text: str) -> str:
        """The content that stands before any call, with this text after all before it."""
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
