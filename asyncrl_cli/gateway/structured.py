"""Output formats: what a request asks of its reply's form, in one internal form for every API (decision 0074).

What is checked here needs no model: the form, and the size. The engine checks before it generates whether a schema, a
regular expression or a grammar is valid. Sessions of training refuse all of them (``session.NO_FORMATS``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl_cli.gateway.errors import invalid_value, unsupported
from asyncrl_cli.gateway.protocol import GenerationRequest, ResponseFormat, StructuredOutputs
from asyncrl_cli.records.generation import OutputFormat, OutputKind

MOST_BYTES: dict[OutputKind, int] = {"json": 2**16, "choice": 2**16, "grammar": 2**16, "regex": 2**13}
"""Bytes of a format's source. The engine's core compiles it, in seconds and hundreds of MB for the largest of them."""
MOST_PATTERN_BYTES = 1024
"""Of all regular expressions in a JSON schema. There vLLM gives their compilation no deadline, and nested repetitions
of 4 kB took xgrammar 4 s, of 8 kB more than 25 s."""
ANY_OBJECT = {"type": "object"}


def output_format(request: GenerationRequest, with_tools: bool = False) -> OutputFormat | None:
    """The format that a request of chat or text completions asks for; None: text.

    Raises ``ApiError`` for a format that is too large or none, for more than one, and as ``refuse_beside_tools`` does.
    """
    asked = list(_asked(request))
    if len(asked) > 1:
        named = " and ".join(one.key for one in asked)
        raise invalid_value(f"{asked[1].key}: only one output format is possible, and there are {named}", asked[1].key)
    if not asked:
        return None
    refuse_beside_tools(asked[0], with_tools)
    return asked[0]


def response_format(asked: ResponseFormat | None) -> OutputFormat | None:
    """The format that a ``response_format`` asks for; None: text. Raises ``ApiError`` as ``json_format`` does."""
    if asked is None or asked.type == "text":
        return None
    schema = ANY_OBJECT if asked.json_schema is None or asked.type == "json_object" else asked.json_schema.json_schema
    return json_format(schema, "response_format")


def flat_format(asked: Mapping[str, Any] | None, key: str) -> OutputFormat | None:
    """As ``response_format``, for the form of Responses and Messages, in which a schema stands beside the type.

    Raises ``ApiError`` for another type, too.
    """
    kind = "text" if asked is None else asked.get("type", "text")
    if asked is None or kind == "text":
        return None
    if kind == "json_object":
        return json_format(ANY_OBJECT, key)
    if kind != "json_schema":
        raise unsupported(key, f"{key} of this type is not supported")
    if not isinstance(schema := asked.get("schema"), dict):
        raise invalid_value(f"{key}.schema: it is not an object", f"{key}.schema")
    return json_format(schema, key)


def json_format(schema: Mapping[str, Any] | str, key: str) -> OutputFormat:
    """The format of a JSON schema, an object or its text. Raises ``ApiError`` when it is too large, or no object."""
    asked = _sized("json", schema if isinstance(schema, str) else json.dumps(schema), key)  # before it is parsed
    try:
        parsed = json.loads(asked.source)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise invalid_value(f"{key}: it is not the text of a JSON object", key)
    size = sum(len(pattern.encode("utf-8", "surrogatepass")) for pattern in _patterns(parsed))
    if size > MOST_PATTERN_BYTES:
        message = f"{key}: its patterns have {size} bytes, and at most {MOST_PATTERN_BYTES} are possible"
        raise invalid_value(message, key)
    return asked


def _patterns(schema: Any) -> Iterator[str]:
    """The regular expressions of a schema, and whatever else has the place of one."""
    rest = [schema]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            if isinstance(pattern := value.get("pattern"), str):
                yield pattern
            if isinstance(by_pattern := value.get("patternProperties"), dict):
                yield from by_pattern
            rest += value.values()
        elif isinstance(value, list):
            rest += value


def refuse_beside_tools(asked: OutputFormat | None, with_tools: bool) -> None:
    """Raise ``ApiError`` for a format where the model is offered tools: a grammar holds for all of a reply, so the
    model could call no tool, without any error."""
    if asked is not None and with_tools:
        message = f"{asked.key} is not supported together with tools: send tool_choice none, or leave one of them out"
        raise unsupported(asked.key, message)


def _asked(request: GenerationRequest) -> Iterator[OutputFormat]:
    if (of_openai := response_format(request.response_format)) is not None:
        yield of_openai
    if request.structured_outputs is not None:
        yield from _of_vllm(request.structured_outputs)
    if request.guided_json is not None:
        yield json_format(request.guided_json, "guided_json")
    if request.guided_regex is not None:
        yield _sized("regex", request.guided_regex, "guided_regex")
    if request.guided_choice is not None:
        yield _sized("choice", json.dumps(request.guided_choice), "guided_choice")
    if request.guided_grammar is not None:
        yield _sized("grammar", request.guided_grammar, "guided_grammar")


def _of_vllm(asked: StructuredOutputs) -> Iterator[OutputFormat]:
    key = "structured_outputs"
    for name, value in (asked.model_extra or {}).items():
        if value not in (None, False):
            raise unsupported(f"{key}.{name}", f"{key}.{name} is not supported")
    if asked.json_ is not None:
        yield json_format(asked.json_, f"{key}.json")
    if asked.json_object:
        yield json_format(ANY_OBJECT, f"{key}.json_object")
    if asked.regex is not None:
        yield _sized("regex", asked.regex, f"{key}.regex")
    if asked.choice is not None:
        yield _sized("choice", json.dumps(asked.choice), f"{key}.choice")
    if asked.grammar is not None:
        yield _sized("grammar", asked.grammar, f"{key}.grammar")


def _sized(kind: OutputKind, source: str, key: str) -> OutputFormat:
    size, most = len(source.encode("utf-8", "surrogatepass")), MOST_BYTES[kind]
    if size > most:
        raise invalid_value(f"{key}: it has {size} bytes, and at most {most} are possible", key)
    return OutputFormat(kind, source, key)
