"""The one place where a reward is asked for and checked.

Invariant: what leaves ``score`` is a finite float or a ``RewardFailure``, whatever the reward function does short
of ending its process or never returning; ``reward_process`` sees to those two.
"""

from __future__ import annotations

import math
import numbers
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.tasks.base import Task
from asyncrl_cli.tasks.function_task import FunctionTask

Response = tuple[Prompt, str, bool]
"""A prompt, the text of the model's response, and whether the model ended it itself."""

SHOWN = 200
"""Characters of a value or of an exception's message that a reason shows."""


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """A response that has no reward. ``reason``, one line, names the function, the prompt and what went wrong."""

    reason: str


def score(task: Task, response: Response) -> float | RewardFailure:
    """The reward of one response. Tracebacks go to stderr."""
    prompt = response[0]
    try:
        value: object = task.reward(*response)
        number = _finite(value)
    except BaseException as error:  # sys.exit() is no way out of a run either
        traceback.print_exc()
        reason = f"{type(error).__name__}: {_shown(error, str)}"
        return RewardFailure(f"{reward_name(task)} failed on prompt {prompt.uid!r}: {reason}")
    if number is None:
        return RewardFailure(
            f"{reward_name(task)} returned {_shown(value, repr)} for prompt {prompt.uid!r}, which is no finite number"
        )
    return number


def reward_name(task: Task) -> str:
    """What the user calls the reward: ``module:function``, or ``module:Class.reward``."""
    if isinstance(task, FunctionTask):
        return task.name
    return f"{type(task).__module__}:{type(task).__qualname__}.reward"


def _finite(value: object) -> float | None:
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _shown(value: object, show: Callable[[object], str]) -> str:
    """A value of the user's as one short line that any file and terminal takes."""
    try:
        text = " ".join(show(value).split())
    except Exception:
        text = f"a {type(value).__name__} that cannot be shown"
    text = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
    return text.encode(errors="replace").decode()
