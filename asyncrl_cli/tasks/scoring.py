"""The one place where a reward is asked for and checked.

Invariant: what leaves ``score`` is a finite float. A reward that fails or is no number stops here, with the
function and the prompt that it came from.
"""

from __future__ import annotations

import math
import numbers

from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.tasks.base import Task
from asyncrl_cli.tasks.errors import TaskError
from asyncrl_cli.tasks.function_task import FunctionTask


def score(task: Task, prompt: Prompt, response: str, finished: bool) -> float:
    """The reward of one response, as a finite float; raises ``TaskError`` for anything else."""
    try:
        value: object = task.reward(prompt, response, finished)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(
            f"{reward_name(task)} failed on prompt {prompt.uid!r}: {type(error).__name__}: {error}",
            mend=f"make it return a number for every response; this one was {_shortened(response)}",
        ) from error
    number = _finite(value)
    if number is not None:
        return number
    raise TaskError(
        f"{reward_name(task)} returned {_shortened(value)} for prompt {prompt.uid!r}",
        mend="return a finite number (a bool counts as 0 or 1)",
    )


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


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
