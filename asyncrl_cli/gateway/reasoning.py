"""Reasoning in what a model wrote: what it thought before it answered.

A parser takes a reply's text and gives its reasoning and its content. The forms of ``FORMS`` are read here, because
vLLM takes twelve seconds and 700 MB to import into a process that has no other use for it; every other format is
vLLM's own parser (tests/gateway/test_reasoning.py compares the two).

A form is read by one pass over the text, which may come in pieces of any size. So the parts of a stream, joined, are
what a complete reply is divided into, and no text is lost but the marks themselves (decision 0070).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.gateway.text_stream import Kind, Part, overlap
from asyncrl_cli.gateway.vllm_parsers import REASONING, quiet


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


_QWEN3 = Form("<think>", "</think>", call=("<tool_call>", "</tool_call>"))
FORMS = {
    "deepseek_r1": Form("<think>", "</think>", once=True),
    "mimo": _QWEN3,
    "qwen3": _QWEN3,
    "seed_oss": Form("<seed:think>", "</seed:think>", call=("<seed:tool_call>", "</seed:tool_call>")),
}
"""By the names of vLLM's parsers."""


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


ReasoningParser = Callable[[str], tuple[str, str]]
"""Gives the reasoning and the content of a reply."""


def check_reasoning_parser(name: str | None) -> None:
    """Raises ``ParserError`` when ``rollout.reasoning_parser`` is none that asyncrl or vLLM has; imports no vLLM."""
    if name is not None:
        REASONING.check(name, FORMS)


def vllm_reasoning_parser(name: str, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> ReasoningParser:
    """vLLM's own parser of a name. Raises ``ParserError``."""
    quiet()
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager

    kwargs = dict(template_kwargs)
    REASONING.check_registered(name, ReasoningParserManager.list_registered())
    parser_class = ReasoningParserManager.get_reasoning_parser(name)
    with REASONING.fits(name):
        parser_class(tokenizer, chat_template_kwargs=kwargs)
    request = ChatCompletionRequest(messages=[], model="", chat_template_kwargs=kwargs)

    def parse(text: str) -> tuple[str, str]:
        try:
            # Parsers keep state from one reply to the next, so each reply has its own.
            found = parser_class(tokenizer, chat_template_kwargs=dict(kwargs)).extract_reasoning(text, request)
        except Exception:  # a parser may fail on anything that a model writes
            return "", text
        return found[0] or "", found[1] or ""

    return parse
