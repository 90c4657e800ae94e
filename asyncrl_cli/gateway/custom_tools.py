"""OpenAI's custom tools, which take text: the model sees functions with the one argument `input`."""

from __future__ import annotations

import json
from typing import Any


def custom_function(name: str, description: str | None, grammar: Any) -> dict[str, Any]:
    """Return a custom tool in the format of chat templates. Its grammar, if any, is part of the description."""
    texts = [description, f"The input follows this grammar:\n{grammar}" if grammar else None]
    function: dict[str, Any] = {"name": name}
    if described := "\n\n".join(filter(None, texts)):
        function["description"] = described
    properties = {"input": {"type": "string"}}
    function["parameters"] = {"type": "object", "properties": properties, "required": ["input"]}
    return {"type": "function", "function": function}


def custom_arguments(text: str) -> str:
    """Return the arguments of the function for a custom tool's input."""
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str | None:
    """Return the input of a custom tool. None if the model wrote other arguments, which are then sent unchanged as a
    function call, because no sampled text may be lost."""
    parsed = json.loads(arguments)
    text = parsed.get("input") if len(parsed) == 1 else None
    try:
        return text if isinstance(text, str) and text.encode() is not None else None
    except UnicodeEncodeError:
        return None
