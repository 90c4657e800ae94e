"""Parse the reasoning and the tool calls in a model's reply.

The most common formats are parsed here, because importing vLLM takes twelve seconds and 700 MB. vLLM's parsers read the
other formats, and are imported only then; names are checked without the import. Tests compare the parsers here with
vLLM's.

A tool parser takes a reply's text and the request's tools. It returns the calls, or None if there is no well-formed
call: a function's name, and a JSON object of arguments that can be encoded as UTF-8. A malformed call is not an error.
The reply is then plain content, which the task scores.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.suggest import did_you_mean
from asyncrl_cli.gateway.reply_stream import Form
from asyncrl_cli.rollout.engine_settings import reasoning_parsers, tool_parsers


class ParserError(ConfigError):
    """The spec's parser does not exist, or does not fit the model's tokenizer."""


@dataclass(frozen=True, slots=True)
class ParserFamily:
    """One of vLLM's two kinds of parsers.

    Args:
        label: the kind's name in messages.
        location: the kind's key in the spec.
    """

    label: str
    location: str

    def check(self, name: str, vllm_names: Collection[str] | None) -> None:
        """Raise ``ParserError`` if vLLM lacks this parser. ``vllm_names``: None if this version of vLLM does not list
        them without its import."""
        if vllm_names is not None and name not in vllm_names:
            hint = did_you_mean(name, vllm_names, f"use one of {', '.join(sorted(vllm_names))}")
            raise ParserError(f"vLLM has no {self.label} {name!r}", location=self.location, hint=hint)

    @contextmanager
    def fits(self, name: str) -> Iterator[None]:
        """Convert an exception in this block to ``ParserError``: a parser does not fit the model's tokenizer."""
        try:
            yield
        except Exception as error:
            raise ParserError(
                f"the {self.label} {name} does not fit this model's tokenizer: {error}",
                location=self.location,
                hint="name the parser for the model's format",
            ) from error


REASONING = ParserFamily("reasoning parser", "rollout.reasoning_parser")
TOOLS = ParserFamily("tool parser", "rollout.tool_parser")


def quiet() -> None:
    """Silence vLLM's parsers, which log every malformed call with its traceback. Call this before importing vLLM."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for package in ("vllm.reasoning", "vllm.tool_parsers", "vllm.parser"):
        logging.getLogger(package).setLevel(logging.CRITICAL)


# -- reasoning

_QWEN3_FORM = Form("<think>", "</think>", call=("<tool_call>", "</tool_call>"))
FORMS = {
    "deepseek_r1": Form("<think>", "</think>", once=True),
    "mimo": _QWEN3_FORM,
    "qwen3": _QWEN3_FORM,
    "seed_oss": Form("<seed:think>", "</seed:think>", call=("<seed:tool_call>", "</seed:tool_call>")),
}
"""Marks around reasoning, by the names of vLLM's parsers."""


ReasoningParser = Callable[[str], tuple[str, str]]
"""Divides a reply into reasoning and content."""


def check_reasoning_parser(name: str | None) -> None:
    """Raise ``ParserError`` if ``rollout.reasoning_parser`` does not exist. Does not import vLLM."""
    if name is not None and name not in FORMS:
        REASONING.check(name, reasoning_parsers())


def vllm_reasoning_parser(name: str, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> ReasoningParser:
    """Make vLLM's parser ``name``. Raises ``ParserError``."""
    quiet()
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager

    kwargs = dict(template_kwargs)
    REASONING.check(name, ReasoningParserManager.list_registered())
    parser_class = ReasoningParserManager.get_reasoning_parser(name)
    with REASONING.fits(name):
        parser_class(tokenizer, chat_template_kwargs=kwargs)
    request = ChatCompletionRequest(messages=[], model="", chat_template_kwargs=kwargs)

    def parse(text: str) -> tuple[str, str]:
        try:
            # A new parser for each reply, because parsers keep state.
            fields = parser_class(tokenizer, chat_template_kwargs=dict(kwargs)).extract_reasoning(text, request)
        except Exception:  # some texts make a parser fail
            return "", text
        return fields[0] or "", fields[1] or ""

    return parse


# -- calls of tools

Tools = Sequence[Mapping[str, Any]]

HERMES = "hermes"
HERMES_MARKS = ("<tool_call>", "</tool_call>")
_HERMES_CALL = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """The text before the calls, and the calls, each a function's name and its arguments as JSON."""

    content: str
    calls: tuple[tuple[str, str], ...]


ToolParser = Callable[[str, Tools], ToolCalls | None]


def check_tool_parser(name: str | None) -> None:
    """Raise ``ParserError`` if ``rollout.tool_parser`` does not exist. Does not import vLLM."""
    if name not in (None, HERMES):
        TOOLS.check(name, tool_parsers())


def hermes(text: str, tools: Tools) -> ToolCalls | None:
    """Parse calls of the form ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``; the last may lack its
    end."""
    call_texts = _HERMES_CALL.findall(text)
    try:
        calls = [json.loads(closed or opened) for closed, opened in call_texts]
        named_calls = [(call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in calls]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return _well_formed(text[: text.find("<tool_call>")], named_calls)


def vllm_tool_parser(name: str, tokenizer: Any, reasoning: bool = False) -> ToolParser:
    """Make vLLM's parser ``name``. ``reasoning``: it gets the text after a reply's reasoning; otherwise reasoning is
    content. Raises ``ParserError``."""
    quiet()
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    TOOLS.check(name, ToolParserManager.list_registered())
    parser_class = ToolParserManager.get_tool_parser(name)
    with TOOLS.fits(name):
        parser_class(tokenizer)

    def parse(text: str, tools: Tools) -> ToolCalls | None:
        try:
            request = ChatCompletionRequest(messages=[], model="", tools=[dict(tool) for tool in tools])
            # A new parser for each reply, because parsers keep state.
            parser = parser_class(tokenizer, request.tools)
            if not reasoning and hasattr(parser, "skip_reasoning_parsing"):
                parser.skip_reasoning_parsing = True
            extracted = parser.extract_tool_calls(text, request)
        except Exception:  # some texts make a parser fail
            return None
        calls = [(call.function.name, call.function.arguments) for call in extracted.tool_calls]
        return _well_formed(extracted.content or "", calls)

    return parse


def _well_formed(content: str, calls: Sequence[tuple[Any, str]]) -> ToolCalls | None:
    try:
        for name, arguments in calls:
            if not isinstance(name, str) or not name or not isinstance(_strict(arguments), dict):
                return None
            f"{name}{arguments}".encode()  # raises for half of a surrogate pair
    except (ValueError, RecursionError):
        return None
    return ToolCalls(content, tuple(calls)) if calls else None


def _strict(arguments: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(arguments, parse_constant=refuse)
