"""What a prompt must be so that it can be encoded, recorded and scored, whatever source it comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from asyncrl_cli.records.prompt import Prompt

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_LIKE_OPENAI = 'write messages as OpenAI does, such as {"role": "user", "content": "…"}'


def fault_of(prompt: Prompt) -> tuple[str, str] | None:
    """What is wrong with a prompt ("has ..."), and what to do; None for a sound one."""
    if isinstance(prompt.content, str):
        if not prompt.content:
            return "has an empty prompt", "give every row a prompt"
    elif not prompt.content:
        return "has no messages", _LIKE_OPENAI
    else:
        for number, message in enumerate(prompt.content, start=1):
            if fault := _fault_of_message(message):
                return f"has a message {number} {fault}", _LIKE_OPENAI
    for name, value in (("uid", prompt.uid), ("prompt", prompt.content), *prompt.fields.items()):
        if fault := _fault_of_text(value):
            return f"has a `{name}` {fault}", "let rows carry text, numbers, booleans, lists and mappings only"
    return None


def _fault_of_message(message: Any) -> str | None:
    if not isinstance(message, Mapping):
        return "that is no object"
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role not in ROLES:
        return f"with the role {role!r}; roles are {', '.join(ROLES)}"
    if calls is not None and not (isinstance(calls, (list, tuple)) and all(map(_is_call, calls))):
        return "with `tool_calls` that are no list of functions with a name and arguments"
    if content is None and not (role == "assistant" and calls):
        return "without content"
    if isinstance(content, (list, tuple)):
        if not content or not all(map(_is_text_part, content)):
            return "whose content has parts that are not text"
    elif content is not None and not isinstance(content, str):
        return "whose content is not text"
    return None


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return (
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments", ""), (str, Mapping))
    )


def _fault_of_text(value: Any) -> str | None:
    try:
        json.dumps(value, ensure_ascii=False, default=_as_json).encode()
    except UnicodeEncodeError as error:
        return f"that is not Unicode: it has {error.object[error.start]!r}, half of a surrogate pair"
    except (TypeError, ValueError, RecursionError) as error:
        return f"that is no JSON value: {error}"
    return None


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__}")
