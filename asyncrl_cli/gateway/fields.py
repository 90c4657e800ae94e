"""The fields of a reply's message, part by part, while its tokens are generated.

Invariant: by kind, the parts joined are a prefix of the message's field, and all of it after ``finish``. Reasoning
comes before content, and content before the calls of tools, which ``finish`` leaves to the answer. So nothing is sent
of what may be, or may follow, the beginning of a call (``layouts.py``), and spaces are sent with the text after them:
parsers strip those before a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from asyncrl_cli.gateway.reasoning import Division, Form
from asyncrl_cli.gateway.text_stream import Kind, Part, TextStream, overlap
from asyncrl_cli.records.prompt import Message

FIELDS: dict[Kind, str] = {"reasoning": "reasoning_content", "content": "content"}
"""The key of a message that has the parts of a kind, in the order in which they come."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a reply's text is divided.

    Args:
        form: of its reasoning; None: it has none.
        calls: the texts at which its content may end; None: they are not known, so content comes at the end.
    """

    form: Form | None = None
    calls: tuple[str, ...] | None = ()


@dataclass(slots=True, eq=False)
class FieldStream:
    """Turns tokens into parts of the message.

    Args:
        decode: makes text of tokens.
        readable: of further tokens, gives those that the text is made of, and whether nothing can be sent after them.
        stop: ends the text.
        layout: None: nothing is sent before ``finish``.
        on_part: gets the parts.
    """

    decode: Callable[[Sequence[int]], str]
    readable: Callable[[Sequence[int]], tuple[Sequence[int], bool]]
    stop: Sequence[str]
    layout: Layout | None
    on_part: Callable[[Part], None]
    _sent: dict[Kind, str] = field(default_factory=dict)
    _rest: str = ""
    _text: TextStream = field(init=False)
    _division: Division | None = field(init=False)
    _held: bool = field(init=False)

    def __post_init__(self) -> None:
        self._text = TextStream(self.decode, self.stop, self._divide)
        self._division = Division(self.layout.form) if self.layout and self.layout.form else None
        self._held = self.layout is None

    def feed(self, ids: Sequence[int]) -> None:
        """The next tokens."""
        if not self._held:
            ids, held = self.readable(ids)
            self._text.feed(ids)
            self._held = self._held or held

    def finish(self, message: Message) -> None:
        """Send what is missing of the message."""
        for kind, name in FIELDS.items():
            final = message.get(name) or ""
            if final.startswith(sent := self._sent.get(kind, "")):
                self._send(kind, final[len(sent) :])

    def _divide(self, text: str) -> None:
        for part in self._division.feed(text) if self._division else [Part("content", text)]:
            if part.kind == "reasoning":
                self._send(*part)
            else:
                self._content(part.text)

    def _content(self, text: str) -> None:
        calls = self.layout.calls if self.layout else None
        if self._held or calls is None:
            return
        text = self._rest + text
        found = [at for mark in calls if (at := text.find(mark)) >= 0]
        self._held = bool(found)
        end = min(found, default=len(text) - overlap(text, calls))
        if calls:
            end = len(text[:end].rstrip())
        self._rest = text[end:]
        self._send("content", text[:end])

    def _send(self, kind: Kind, text: str) -> None:
        if text:
            self._sent[kind] = self._sent.get(kind, "") + text
            self.on_part(Part(kind, text))
