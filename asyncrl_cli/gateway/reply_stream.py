"""Send a reply's message part by part, while its tokens are generated.

Invariants:

* The pieces of ``TextStream``, joined, are a prefix of the reply's final text. So it holds back an incomplete
  character, and text that may begin a stop string.
* The parts of ``FieldStream``, joined by kind, are a prefix of the message's field, and the whole field after
  ``finish``. Reasoning comes before content, and content before tool calls, which the answer renders at the end. So the
  stream sends no text that may begin or follow a call, and it sends spaces only with the text after them, because
  parsers strip the spaces before a call.
* Reasoning is found in one pass over the text, in pieces of any size. So a stream divides a reply in the same way as a
  complete answer, and only the marks themselves are lost (decision 0017).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Literal, NamedTuple

from asyncrl_cli.records.prompt import Message

TextKind = Literal["content", "reasoning"]

FIELDS: dict[TextKind, str] = {"reasoning": "reasoning_content", "content": "content"}
"""The message's key for each kind, in the order of a reply."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""A tokenizer decodes an incomplete character to this."""
LONGEST_CHARACTER = 4
"""Maximal number of bytes, and so of tokens, in a character."""


class ReplyPart(NamedTuple):
    """A piece of a reply's content or reasoning."""

    kind: TextKind
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
        settled_text = self._decode(self._ids[self._context : self._settled])
        text = self._decode(self._ids[self._context :])
        end = len(self._ids)
        if text.endswith(INCOMPLETE):
            if end - self._settled <= 2 * LONGEST_CHARACTER:
                return ""
            # These bytes are no character at all. Without this, all of them would be decoded again each time.
            end, undecided_text = end - LONGEST_CHARACTER, text
            text = self._decode(self._ids[self._context : end])
            if not undecided_text.startswith(text):
                return ""
        if not text.startswith(settled_text):
            return ""
        self._text += text[len(settled_text) :]
        self._context, self._settled = self._settled, end
        # Up to a stop string, or to text that may begin one.
        stop_positions = [position for stop in self._stop if (position := self._text.find(stop)) >= 0]
        visible_end = min(stop_positions, default=len(self._text) - overlap(self._text, self._stop))
        start, self._sent = self._sent, max(self._sent, visible_end)
        return self._text[start : self._sent]


def overlap(text: str, marks: Iterable[str]) -> int:
    """Number of characters at the end of a text that may begin a mark."""
    return max((length for mark in marks for length in range(1, len(mark)) if text.endswith(mark[:length])), default=0)


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
        self._text_kind: TextKind = "reasoning"
        self._undecided_text = ""

    def feed(self, text: str) -> Iterator[ReplyPart]:
        """Yield the parts that have become certain. Text that may begin a mark waits for the next piece."""
        self._undecided_text += text
        while nearest_mark := min(
            ((self._undecided_text.find(mark), mark) for mark in self._marks if mark in self._undecided_text),
            default=None,
        ):
            position, mark = nearest_mark
            yield from self._take(position)
            if self._text_kind == "reasoning" and mark != self._form.opening:
                self._text_kind = "content"
            if mark in self._form.call:
                yield from self._take(len(mark))
            else:
                self._undecided_text = self._undecided_text[len(mark) :]
        yield from self._take(len(self._undecided_text) - overlap(self._undecided_text, self._marks))

    def finish(self) -> Iterator[ReplyPart]:
        """Yield the rest at the end of the text."""
        yield from self._take(len(self._undecided_text))

    @property
    def _marks(self) -> tuple[str, ...]:
        if self._text_kind == "reasoning":
            return self._form.opening, self._form.closing, *self._form.call[:1]
        return () if self._form.once else (self._form.closing,)

    def _take(self, end: int) -> Iterator[ReplyPart]:
        text, self._undecided_text = self._undecided_text[:end], self._undecided_text[end:]
        if text:
            yield ReplyPart(self._text_kind, text)


def divided(text: str, form: Form) -> tuple[str, str]:
    """The reasoning and the content of a reply."""
    division = Division(form)
    reply_parts = [*division.feed(text), *division.finish()]
    reasoning, content = (
        "".join(reply_part.text for reply_part in reply_parts if reply_part.kind == text_kind)
        for text_kind in ("reasoning", "content")
    )
    return reasoning, content


class FieldStream:
    """Turns tokens into parts of a message."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str],
        *,
        dropped: Set[int] = frozenset(),
        form: Form | None = None,
        calls: tuple[str, ...] | None = (),
        is_held: bool = False,
    ) -> None:
        """``dropped``: tokens that are not part of the text. ``form``: the marks around reasoning, if any. ``calls``:
        texts that may end the content; None if they are unknown, so content is sent by ``finish``. ``is_held``: nothing
        is sent before ``finish``."""
        self._dropped = dropped
        self._text = TextStream(decode, stop)
        self._division = Division(form) if form else None
        self._calls = calls
        self._is_held = is_held
        self._content_held = calls is None
        self._undecided_content = ""
        self._sent: dict[TextKind, str] = {}

    def feed(self, ids: Sequence[int]) -> list[ReplyPart]:
        """Take the next tokens; returns the parts that have become certain."""
        if self._is_held:
            return []
        text = self._text.feed([token for token in ids if token not in self._dropped])
        divided_parts = self._division.feed(text) if self._division else [ReplyPart("content", text)]
        certain = [
            reply_part if reply_part.kind == "reasoning" else ReplyPart("content", self._before_calls(reply_part.text))
            for reply_part in divided_parts
        ]
        return self._sending(certain)

    def finish(self, message: Message) -> list[ReplyPart]:
        """Return the parts of the message that have not been sent."""
        remaining_parts = []
        for text_kind, name in FIELDS.items():
            final = message.get(name) or ""
            if final.startswith(sent := self._sent.get(text_kind, "")):
                remaining_parts.append(ReplyPart(text_kind, final[len(sent) :]))
        return self._sending(remaining_parts)

    def _before_calls(self, text: str) -> str:
        """Take more text; returns the content that certainly comes before any call."""
        if self._content_held or self._calls is None:
            return ""
        text = self._undecided_content + text
        call_positions = [position for mark in self._calls if (position := text.find(mark)) >= 0]
        self._content_held = bool(call_positions)
        end = min(call_positions, default=len(text) - overlap(text, self._calls))
        if self._calls:
            end = len(text[:end].rstrip())
        self._undecided_content = text[end:]
        return text[:end]

    def _sending(self, reply_parts: Iterable[ReplyPart]) -> list[ReplyPart]:
        reply_parts = [reply_part for reply_part in reply_parts if reply_part.text]
        for reply_part in reply_parts:
            self._sent[reply_part.kind] = self._sent.get(reply_part.kind, "") + reply_part.text
        return reply_parts
