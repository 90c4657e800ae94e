"""How the shell is used, for a warm start: look at a file, change one token of it, say that it is done.

As in ``chain_sum``, the demonstrations make the task learnable by reward alone: they teach a policy that *can* work
carefully, and mostly does not. A careful one says first what the function needs, and then makes that change. Most
demonstrations say nothing: half of these change nothing, the others make a random plausible change
(``mutations.edits``). Only careful work gets a reward, so reinforcement finds it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from asyncrl_cli.records.prompt import Message
from asyncrl_cli.tasks.ready.bugfix.mutations import Kind, edits
from asyncrl_cli.tasks.ready.bugfix.repository import Repository
from asyncrl_cli.tasks.tools import call_message, result_message

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
    messages.append(result_message(0, files[name].rstrip("\n")))
    if right or rng.random() >= IDLE:
        change = f"sed -i '{edit.sed(files[name])}' {name}"
        announced = f"Needs {edit.text}. " if edit == fix else None
        messages.append(_call(1, change, announced))
        if reply == "edit":
            return messages
        messages.append(result_message(1, ""))
    return [*messages, {"role": "assistant", "content": DONE}]


def _call(number: int, command: str, content: str | None = None) -> Message:
    return call_message(number, TOOL, {"command": command}, content)
