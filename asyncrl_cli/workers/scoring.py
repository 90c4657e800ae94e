"""Call a reward function and check its result.

Invariant: ``score`` and ``score_async`` return ``Scored`` with finite floats, or a ``RewardFailure``, whatever the
reward function does. If it ends its process or never returns, the owner of the process handles that.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import resource
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.core.user_code import defined_at, raised_at
from asyncrl_cli.records.generation import Rollout
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.tasks.base import LARGEST, as_result, finite, scores_groups
from asyncrl_cli.tasks.function_task import FunctionTask
from asyncrl_cli.tasks.play import awaited

Response = tuple[Prompt, str, bool] | tuple[Prompt, tuple[str, ...], tuple[bool, ...]]
"""A prompt, the text of the model's response, and True if the model ended it itself; or all texts of a group with one
such flag each."""
Answer = Scored | RewardFailure | tuple[Scored, ...]
"""The answer to a ``Response``. A group has one score for each text, or one failure."""

FORMS = (
    "return a finite number, RewardResult(reward, metrics) or {'score': number} for every response, or None for a "
    f"response that cannot be scored; numbers are at most {LARGEST:g} in size"
)
"""The valid return values of a reward, for messages."""
METRIC_NAME = re.compile(r"(?=.{1,120}\Z)(?!\.\.?(/|\Z))[\w.\- ]+(/(?!\.\.?(/|\Z))[\w.\- ]+)*")
"""Names that every monitor accepts: MLflow refuses a whole step for other characters, for an empty part or ``.``
between slashes, and for more than 250 characters with a task's and an evaluation's name."""
MAX_TEXT = 200
"""Messages show so many characters of a value or of an exception's text."""


def responses_of(prompt: Prompt, rollouts: Sequence[Rollout], together: bool) -> list[Response]:
    """The responses to score for one prompt's rollouts, in their order: one for all ``together``, or one for each."""
    if together:
        texts, finished = zip(*((rollout.text, rollout.finished) for rollout in rollouts), strict=True)
        return [(prompt, texts, finished)]
    return [(prompt, rollout.text, rollout.finished) for rollout in rollouts]


def score(task: Any, response: Response) -> Answer:
    """Score one response. Tracebacks go to stderr. Must not be called in a running event loop."""
    try:
        return _checked(awaited(_called(task, response)), task, response)
    except BaseException as error:  # sys.exit() must not end the process
        return failed(error, name=reward_name(task), prompt=response[0], location=reward_location(task))


async def score_async(task: Any, response: Response) -> Answer:
    """Score one response in a running event loop. Cancelling the call cancels the reward."""
    try:
        value = _called(task, response)
        if inspect.isawaitable(value):
            value = await value
        return _checked(value, task, response)
    except BaseException as error:
        current = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and current is not None and current.cancelling():
            raise
        return failed(error, name=reward_name(task), prompt=response[0], location=reward_location(task))


def _called(task: Any, response: Response) -> object:
    prompt, text, finished = response
    if isinstance(text, str):
        return task.reward(prompt, text, finished)
    takes_finished = "finished" in inspect.signature(task.rewards).parameters
    return task.rewards(prompt, list(text), **({"finished": list(finished)} if takes_finished else {}))  # type: ignore[arg-type]


def _checked(value: Any, task: object, response: Response) -> Answer:
    """Check a reward's return value. For a group it must be a list with one result for each response."""
    prompt, text, _ = response
    name, location = reward_name(task), reward_location(task)
    if isinstance(text, str):
        return checked(value, name=name, prompt=prompt, location=location)
    try:
        values = None if isinstance(value, str | bytes | Mapping | Set) else list(value)
    except TypeError:
        values = None
    if values is None or len(values) != len(text):
        returned = _short_text(value, repr) if values is None else f"{len(values)} rewards"
        problem = f"{name} returned {returned} for the {len(text)} responses of prompt {prompt.uid!r}"
        return RewardFailure(f"{problem}; return a list with a result for each, in their order: {FORMS}", location)
    scores: list[Scored] = []
    for index, result in enumerate(values):
        score = checked(result, name=f"{name}, result {index},", prompt=prompt, location=location)
        if isinstance(score, RewardFailure):
            return score
        scores.append(score)
    return tuple(scores)


def checked(value: object, name: str, prompt: Prompt, location: str = "") -> Scored | RewardFailure:
    """Check the return value for one response: a number, None, a ``RewardResult``, or a dict with a ``score`` as in
    verl. The reward's ``name`` and ``location`` are for messages."""

    def refused(problem: str) -> RewardFailure:
        return RewardFailure(f"{name} returned {problem} for prompt {prompt.uid!r}; {FORMS}", location)

    result = as_result(value)
    if not isinstance(result.metrics, Mapping):
        return refused(f"metrics {_short_text(result.metrics, repr)}")
    reward = finite(result.reward)
    if reward is None and result.reward is not None:
        return refused(_short_text(result.reward, repr))
    metrics: dict[str, float] = {}
    for key, item in result.metrics.items():
        figure = finite(item)
        if not isinstance(key, str) or figure is None:
            return refused(f"the metric {_short_text(key, repr)}: {_short_text(item, repr)}")
        if not METRIC_NAME.fullmatch(key):
            problem = f"{name} returned the metric name {_short_text(key, repr)} for prompt {prompt.uid!r}"
            return RewardFailure(f"{problem}, which MLflow refuses; use up to 120 letters, digits and _-./", location)
        metrics[key] = figure
    return Scored(reward, metrics)


def took_too_long(name: str, prompt: Prompt, limit_s: float, location: str) -> RewardFailure:
    """The failure of a reward that exceeded its time limit. ``location``: where the reward is defined."""
    return RewardFailure(f"{name} took more than {limit_s:g} s on prompt {prompt.uid!r}", location)


def awaits(task: object) -> bool:
    """True if the task's reward is an async function, so several calls can run at a time."""
    return inspect.iscoroutinefunction(_function(task))


def failed(error: BaseException, name: str, prompt: Prompt, location: str = "") -> RewardFailure:
    """The failure of a reward that raised an exception. Prints the traceback, so it must be called in the ``except``
    clause. ``location``: where the reward is defined, for an exception that passed no line of the user's code."""
    traceback.print_exc()
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    text = _short_text(error, str)
    if isinstance(error, UserError):
        text, location = f"{error.message} ({error.hint})", error.location or location
    if isinstance(error, MemoryError) and limit != resource.RLIM_INFINITY:
        text = f"{text} (its process may take {limit // 2**20} MiB)".strip()
    reason = f"{name} failed on prompt {prompt.uid!r}: {type(error).__name__}: {text}"
    return RewardFailure(reason, location if isinstance(error, UserError) else raised_at(error) or location)


def reward_name(task: object) -> str:
    """The user's name for the reward: ``module:function``, or ``module:Class.reward``."""
    if isinstance(task, FunctionTask):
        return task.name
    method = "rewards" if scores_groups(task) else "reward"
    return f"{type(task).__module__}:{type(task).__qualname__}.{method}"


def reward_location(task: object) -> str:
    """Where the user's code defines the reward, as ``file:line``; empty for a ready task."""
    return defined_at(_function(task))


def _function(task: object) -> Any:
    """The user's function or method that computes the reward."""
    if isinstance(task, FunctionTask):
        return task.function
    return getattr(task, "rewards" if scores_groups(task) else "reward", None)


def _short_text(value: object, show: Callable[[object], str]) -> str:
    """Show a user's value as one short line that every file and terminal can encode."""
    try:
        text = " ".join(show(value).split())
    except Exception:
        text = f"a {type(value).__name__} that cannot be shown"
    text = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
    return text.encode(errors="replace").decode()
