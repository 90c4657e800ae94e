"""Tool calls in what a model wrote.

A parser takes a reply's text and the request's tools, and gives the calls in it, or None where it finds none that are
well formed: a function's name, and a JSON object of arguments that can be sent on as UTF-8. A malformed call is not an
error: the reply is then plain content, which the task scores.

``hermes`` reads exactly what vLLM's parser of that name does (tests/gateway/test_chat.py compares the two). It is
written out here because vLLM takes twelve seconds and 700 MB to import into a process that has no other use for it.
Every other format is vLLM's own parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.gateway.layouts import HERMES
from asyncrl_cli.gateway.vllm_parsers import TOOLS, quiet

Tools = Sequence[Mapping[str, Any]]

HERMES_MARKS = ("<tool_call>", "</tool_call>")
_HERMES_CALL = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """The text before the calls, and the calls: each a function's name and its arguments as JSON."""

    content: str
    calls: tuple[tuple[str, str], ...]


ToolParser = Callable[[str, Tools], ToolCalls | None]


def tool_parser(name: str | None, tokenizer: Any, reasoning: bool = False) -> ToolParser:
    """The parser of a name; None means ``hermes``. With ``reasoning``, it gets what follows a reply's reasoning;
    otherwise reasoning is content. Raises ``ParserError``."""
    return hermes if name in (None, HERMES) else _of_vllm(name, tokenizer, reasoning)


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


def _of_vllm(name: str, tokenizer: Any, reasoning: bool) -> ToolParser:
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
