"""A plain reward function as a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl_cli.data.prompts import Prompt


class FunctionTask:
    """A task of one function ``f(prompt, response) -> float``.

    ``prompt`` is the row as a dict: its ``uid``, its ``prompt`` (text, or a list of messages) and all its
    other fields. The prompts come from a file.
    """

    def __init__(self, function: Callable[[dict[str, Any], str], Any], name: str) -> None:
        self.name = name
        self._function = function

    def reward(self, prompt: Prompt, response: str, finished: bool) -> float:
        """What the function returns; ``scoring.score`` checks that it is a number."""
        content = prompt.content if isinstance(prompt.content, str) else [dict(message) for message in prompt.content]
        row = {**prompt.fields, "uid": prompt.uid, "prompt": content}
        value: float = self._function(row, response)
        return value
