"""The numbered messages that a worker process and its owner send each other over a socket.

A message is the pickle of ``(number, message)`` after its length (``multiprocessing.connection``'s form). The owner
numbers its requests; ``Load`` is the first of them. Each is answered once, with its number:

    Load   -> Loaded or TaskError
    Score  -> Answer
    Play   -> Played
    Cancel -> no answer: it stops the request with its number, which is then answered

Without a request, a process with an event loop sends ``Beat`` every ``BEAT_S``, and ``Blocked`` once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.tasks.base import ModelAccess, ScoreLater
from asyncrl_cli.workers.scoring import Response

GRACE_S = 5.0
"""Seconds that a cancelled episode gets to clean up."""
BEAT_S = 1.0
"""Seconds between two beats."""


class Work(StrEnum):
    """The work of a worker process."""

    PLAIN = "plain"
    """Plain reward functions, one at a time in the main thread, as functions that set alarms need it."""
    ASYNC = "async"
    """Async reward functions, several at a time in one event loop."""
    EPISODES = "episodes"
    """Agents and environments, several at a time in one event loop."""


class Retry(StrEnum):
    """Whether to play an episode again, and how."""

    NONE = "none"
    """It has its result."""
    RESTART = "restart"
    """From its start: its own code failed, and may succeed another time."""
    RESUME = "resume"
    """From what was generated: the cause is outside the episode."""
    ISOLATED = "isolated"
    """From what was generated, in a separate process: it may have been the cause."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load the task. ``work`` None: plain rewards, or async ones if all of the task's are.

    ``blocked_s``: seconds that an episode may block the event loop.
    """

    spec: TaskSpec
    search_path: Path
    work: Work | None
    blocked_s: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """The task is loaded.

    Args:
        work: what the process does.
        names: what the user calls the task or its reward, by the name of the mix's task ("" when there is no mix).
        async_rewards: those whose reward is an async function.
    """

    work: Work
    names: Mapping[str, str]
    async_rewards: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Score:
    """Score a response. After ``limit_s`` seconds, an async reward is cancelled, and the owner ends a plain one."""

    response: Response
    limit_s: float


@dataclass(frozen=True, slots=True)
class Play:
    """Play an episode. Without ``access`` to a model only try its environment, with one empty reply."""

    prompt: Prompt
    access: ModelAccess | None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop the request with this message's number."""


@dataclass(frozen=True, slots=True)
class Played:
    """The result of playing an episode. ``score`` None or ``ScoreLater`` leaves it to the task's
    ``reward``.

    ``stuck``: something of it is still running in its process and cannot be stopped.
    """

    score: Scored | RewardFailure | ScoreLater | None
    retry: Retry = Retry.NONE
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class Beat:
    """The event loop runs."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """The episode with this message's number blocks the event loop; it is unknown which one without a number."""
