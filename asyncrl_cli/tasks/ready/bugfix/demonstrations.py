"""How the shell is used, for a warm start: look at a file, change one token of it, say that it is done.

What makes the task learnable by reward alone is as in ``chain_sum``: a policy that *can* work carefully, and mostly
does not. Careful is to say first what the function needs, and then to make that change. Mostly the demonstrations say
nothing, and half of them change nothing while the others make another plausible change (``mutations.edits``), drawn at
random. Reinforcement finds what to say first because only that pays.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from asyncrl_cli.records.prompt import Message
from asyncrl_cli.tasks.ready.bugfix.mutations import Kind, edits
from asyncrl_cli.tasks.ready.bugfix.repository import Repository

TOOL = "shell"
DONE = "Done."
REPLIES = ("look", "edit", "edit", "edit", "answer")
"""What a demonstration teaches, with its share: the edit is the part that differs."""
IDLE = 0.5
"""Of the demonstrations that are not right, the share that changes nothing."""


def demonstration(
    rng: random.Random, instruction: str, made: Repository, kinds: Sequence[Kind], right: bool
) -> list[Message]:
    """A conversation up to one of the three replies, about one of the functions with a bug.

    Its change is the ``right`` one, which is announced. Or there is none, or it is another plausible one, each with the
    same probability.
    """
    function, fix = rng.choice(sorted(made.fixes.items(), key=lambda item: item[0]))
    name, files = f"{function.split('.')[0]}.py", made.files
    others = [edit for edit in edits(files[name], kinds) if edit.applied(files[name]) != fix.applied(files[name])]
    edit = fix if right or not others else rng.choice(others)
    reply = rng.choice(REPLIES)
    messages: list[Message] = [{"role": "user", "content": instruction}, _call(0, f"cat {name}")]
    if reply == "look":
        return messages
    messages.append(_result(0, files[name].rstrip("\n")))
    if right or rng.random() >= IDLE:
        change = f"sed -i '{edit.sed(files[name])}' {name}"
        announced = f"Needs {edit.text}. " if edit == fix else None
        messages.append(_call(1, change, announced))
        if reply == "edit":
            return messages
        messages.append(_result(1, ""))
    return [*messages, {"role": "assistant", "content": DONE}]


def _call(number: int, command: str, content: str | None = None) -> Message:
    function = {"name": TOOL, "arguments": json.dumps({"command": command})}
    call = {"id": f"call{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _result(number: int, content: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call{number}", "content": content}
