"""Parsers of what a model wrote: its reasoning, and its calls of tools.

The most common formats are read here: vLLM takes twelve seconds and 700 MB to import into a process that has no other
use for it. Every other format is vLLM's own parser, which is loaded only then; names are checked without it. The tests
compare the parsers here with vLLM's.

A tool parser takes a reply's text and the request's tools, and gives the calls in it, or None where it finds none that
are well formed: a function's name, and a JSON object of arguments that can be sent on as UTF-8. A malformed call is not
an error: the reply is then plain content, which the task scores.
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
    """The spec names no parser, or one that this model's tokenizer has no tokens for."""


@dataclass(frozen=True, slots=True)
class ParserKind:
    """One of vLLM's two kinds of parsers.

    Args:
        what: its name in messages.
        location: its key in the spec.
        names: the names of its parsers, without vLLM's import; None where this vLLM does not say.
    """

    what: str
    location: str
    names: Callable[[], Collection[str] | None]

    def check(self, name: str, own: Collection[str]) -> None:
        """Raise ``ParserError`` when neither asyncrl (``own``) nor vLLM has a parser of that name. Imports no vLLM."""
        known = None if name in own else self.names()
        if known is not None:
            self.check_registered(name, known)

    def check_registered(self, name: str, known: Collection[str]) -> None:
        """Raise ``ParserError`` when a name is none of those that vLLM has registered."""
        if name not in known:
            hint = did_you_mean(name, known, f"use one of {', '.join(sorted(known))}")
            raise ParserError(f"vLLM has no {self.what} {name!r}", location=self.location, hint=hint)

    @contextmanager
    def fits(self, name: str) -> Iterator[None]:
        """Raise ``ParserError`` when a parser of vLLM's cannot be made for the model's tokenizer in this block."""
        try:
            yield
        except Exception as error:
            raise ParserError(
                f"the {self.what} {name} does not fit this model's tokenizer: {error}",
                location=self.location,
                hint="name the parser of the model's own format",
            ) from error


REASONING = ParserKind("reasoning parser", "rollout.reasoning_parser", reasoning_parsers)
TOOLS = ParserKind("tool parser", "rollout.tool_parser", tool_parsers)


def quiet() -> None:
    """Keep vLLM's log lines out of the live view: it logs every malformed call of a model with its traceback. Call it
    before the first import of vLLM."""
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
"""By the names of vLLM's parsers."""


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


# -- calls of tools

Tools = Sequence[Mapping[str, Any]]

HERMES = "hermes"
HERMES_MARKS = ("<tool_call>", "</tool_call>")
_HERMES_CALL = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)

_QWEN3_CALLS = ("<tool_call>", "<function=", "</think>")
_GLM_CALLS = ("<tool_call>", "<think>", "</think>")
_LLAMA_CALLS = ("<|python_tag|>", "{")
_DEEPSEEK_V3_CALLS = ("<｜tool▁calls▁begin｜>",)

LAYOUTS: dict[str, tuple[str, ...]] = {
    "deepseek_v3": _DEEPSEEK_V3_CALLS,
    "deepseek_v31": _DEEPSEEK_V3_CALLS,
    "deepseek_v32": ("<｜DSML｜function_calls>", "<｜DSML｜invoke name="),
    "glm45": _GLM_CALLS,
    "glm47": _GLM_CALLS,
    "granite": ("<|tool_call|>", "<tool_call>"),
    "granite-20b-fc": ("<function_call>",),
    HERMES: ("<tool_call>",),
    "jamba": ("<tool_calls>",),
    "kimi_k2": ("<|tool_calls_section_begin|>", "</think>"),
    "llama3_json": _LLAMA_CALLS,
    "llama4_json": _LLAMA_CALLS,
    "longcat": ("<longcat_tool_call>",),
    "mimo": _QWEN3_CALLS,
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=", "</think>"),
    "mistral": ("[TOOL_CALLS]", "[THINK]", "[/THINK]", "<think>", "</think>"),
    "phi4_mini_json": ("functools",),
    "qwen3_coder": _QWEN3_CALLS,
    "qwen3_json": ("<tool_call>",),
    "qwen3_xml": _QWEN3_CALLS,
    "seed_oss": ("<seed:tool_call>", "<function=", "</seed:think>"),
    "step3": ("<｜tool_calls_begin｜>",),
}
"""Where the content of a reply that calls tools may end, by the name of its tool parser.

These are all texts at which the parser may stop to read content: they begin a call, or are marks that the parser drops.
The text before the first of them is the beginning of the content, whatever follows, except for spaces right before it.
So it can be sent while the reply is generated. The content of a format that is not here comes at the reply's end."""


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """The text before the calls, and the calls: each a function's name and its arguments as JSON."""

    content: str
    calls: tuple[tuple[str, str], ...]


ToolParser = Callable[[str, Tools], ToolCalls | None]


def tool_parser(name: str | None, tokenizer: Any, reasoning: bool = False) -> ToolParser:
    """The parser of a name; None means ``hermes``. With ``reasoning``, it gets what follows a reply's reasoning;
    otherwise reasoning is content. Raises ``ParserError``."""
    return hermes if name in (None, HERMES) else vllm_tool_parser(name, tokenizer, reasoning)


def check_tool_parser(name: str | None) -> None:
    """Raises ``ParserError`` when ``rollout.tool_parser`` is none that asyncrl or vLLM has; imports no vLLM."""
    if name is not None:
        TOOLS.check(name, (HERMES,))


def hermes(text: str, tools: Tools) -> ToolCalls | None:
    """Calls as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``; the last may lack its end."""
    found = _HERMES_CALL.findall(text)
    try:
        calls = [json.loads(closed or opened) for closed, opened in found]
        named = [(call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in calls]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return _well_formed(text[: text.find("<tool_call>")], named)


def vllm_tool_parser(name: str, tokenizer: Any, reasoning: bool) -> ToolParser:
    quiet()
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    TOOLS.check_registered(name, ToolParserManager.list_registered())
    parser_class = ToolParserManager.get_tool_parser(name)
    with TOOLS.fits(name):
        parser_class(tokenizer)

    def parse(text: str, tools: Tools) -> ToolCalls | None:
        try:
            request = ChatCompletionRequest(messages=[], model="", tools=[dict(tool) for tool in tools])
            # Parsers keep state from one reply to the next, so each reply has its own.
            parser = parser_class(tokenizer, request.tools)
            if not reasoning and hasattr(parser, "skip_reasoning_parsing"):
                parser.skip_reasoning_parsing = True
            found = parser.extract_tool_calls(text, request)
        except Exception:  # a parser may fail on anything that a model writes
            return None
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
        return _well_formed(found.content or "", calls)

    return parse


def _well_formed(content: str, calls: Sequence[tuple[Any, str]]) -> ToolCalls | None:
    try:
        for name, arguments in calls:
            if not isinstance(name, str) or not name or not isinstance(_strict(arguments), dict):
                return None
            f"{name}{arguments}".encode()  # no half of a surrogate pair
    except (ValueError, RecursionError):
        return None
    return ToolCalls(content, tuple(calls)) if calls else None


def _strict(arguments: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(arguments, parse_constant=refuse)
