"""Messages between a worker process and its owner, over a socket.

A message is the pickled ``(number, message)`` after its length, in the format of ``multiprocessing.connection``. The
owner numbers its requests; the first is ``Load``. Each gets one answer, with the same number:

    Load   -> LoadedTask or TaskError
    Score  -> Answer
    Play   -> Played
    Cancel -> no answer: it stops the request with its number, which is then answered

Without a request, a process with an event loop sends ``Beat`` every ``BEAT_S``, and ``BlockedLoop`` at most once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.tasks.base import ModelAccess, ScoreLater
from asyncrl_cli.workers.scoring import Response

GRACE_S = 5.0
"""Seconds that a cancelled episode has to clean up."""
BEAT_S = 1.0
"""Seconds between two beats."""


class Role(StrEnum):
    """The requests that a worker process takes."""

    PLAIN = "plain"
    """Reward functions, one at a time in the main thread: the only thread that may set alarms."""
    ASYNC = "async"
    """Async reward functions, several at a time in one event loop."""
    EPISODES = "episodes"
    """Agents and environments, several at a time in one event loop."""


class Retry(StrEnum):
    """How to play an episode again, if at all."""

    NONE = "none"
    """Not at all: the result is final."""
    RESTART = "restart"
    """From the start: the episode's own code failed, and may succeed another time."""
    RESUME = "resume"
    """From the tokens generated so far: the cause was outside the episode."""
    ISOLATED = "isolated"
    """From the tokens generated so far, in a separate process: the episode may have been the cause."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load the task. Without ``role``, load rewards: ``ASYNC`` if all of the task's rewards are async, else ``PLAIN``.

    ``blocked_s``: seconds that an episode may block the event loop.
    """

    spec: TaskSpec
    search_path: Path
    role: Role | None
    blocked_s: float


@dataclass(frozen=True, slots=True)
class LoadedTask:
    """The task is loaded. ``names``: the user's name for the task or its reward, by the mix's task ("" without a
    mix). ``locations``: where the user's code defines these rewards."""

    role: Role
    names: Mapping[str, str]
    locations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Score:
    """Score a response. After ``limit_s`` seconds an async reward is cancelled; for a plain one the owner ends the
    process."""

    response: Response
    limit_s: float


@dataclass(frozen=True, slots=True)
class Play:
    """Play an episode. Without ``access`` to a model, only try its environment with one empty reply."""

    prompt: Prompt
    access: ModelAccess | None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop the request with this message's number."""


@dataclass(frozen=True, slots=True)
class Played:
    """The result of playing an episode. With None or ``ScoreLater`` as ``score``, the task's ``reward`` scores it.

    ``stuck``: a part of the episode still runs in its process and cannot be stopped.
    """

    score: Scored | RewardFailure | ScoreLater | None
    retry: Retry = Retry.NONE
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class Beat:
    """The event loop runs."""


@dataclass(frozen=True, slots=True)
class BlockedLoop:
    """The episode with this message's number blocks the event loop. Without a number it is unknown which one does."""
