"""Conversations of the template bugfix-agent in the format of mini-swe-agent.

The module is copied into the folder of a run's spec and imported by the run's processes, so it imports no test module.
The files of the template bugfix-agent are copied, too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from bugfix import TINY, Bugfix

from asyncrl_cli.records.prompt import Message

TOOL = "bash"
FINISH = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "'": "\\u0027"}
"""Characters that mini-swe-agent escapes in observations, because it uses Jinja's ``tojson``."""


def conversation(rng: random.Random) -> Sequence[Message]:
    """A faultless conversation of the template with mini-swe-agent's tool, observations and last command."""
    return [translated(message) for message in Bugfix(**TINY).demonstration(rng, True)]


def translated(message: Message) -> Message:
    if message["role"] == "tool":
        return message | {"content": observation(message["content"])}
    if message["role"] != "assistant":
        return message
    calls = message.get("tool_calls") or [{"id": "call2", "type": "function", "function": {}}]
    arguments = calls[0]["function"].get("arguments") or json.dumps({"command": FINISH})
    content = message["content"] if message.get("tool_calls") else None
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [calls[0] | {"function": {"name": TOOL, "arguments": arguments}}],
    }


def observation(output: str) -> str:
    """mini-swe-agent's message to the model after a command that has succeeded."""
    text = json.dumps(output + "\n" if output else "")
    for character, escaped in ESCAPED.items():
        text = text.replace(character, escaped)
    return f'{{\n  "returncode": 0,\n  "output": {text}\n}}'
