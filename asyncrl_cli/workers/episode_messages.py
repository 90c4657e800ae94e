"""What a process that plays episodes and its owner tell each other.

Over a socket go pickled messages, each after its length; over a pipe the process gives its pulse.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.tasks.base import ModelAccess
from asyncrl_cli.workers.scoring import RewardFailure, Scored

GRACE_S = 5.0
"""Seconds that a cancelled episode gets to clean up."""
BEAT_S = 1.0
"""Seconds between two bytes of the pulse."""
BEATS, HELD = b".", b"!"
"""The pulse: the loop turns; an episode (its number, then a line feed; no number is an unknown one) holds it."""

_LENGTH = struct.Struct("!I")


class Retry(StrEnum):
    """Whether to play an episode again, and how."""

    NONE = "none"
    """It has its result."""
    RESTART = "restart"
    """From its start: its own code failed, and may succeed another time."""
    RESUME = "resume"
    """From what was generated: the cause lies outside the episode."""
    ISOLATED = "isolated"
    """From what was generated, in a process of its own: it may have been the cause."""


@dataclass(frozen=True, slots=True)
class Load:
    """The first message to the process. ``blocked_s``: seconds that the loop may stand still."""

    spec: TaskSpec
    search_path: Path
    blocked_s: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """The answer to ``Load``: what the user calls the task, or why it cannot be loaded."""

    name: str
    error: TaskError | None = None


@dataclass(frozen=True, slots=True)
class Play:
    """Play an episode. ``number`` names it between the two processes."""

    number: int
    prompt: Prompt
    access: ModelAccess


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop an episode; it is answered, too."""

    number: int


@dataclass(frozen=True, slots=True)
class Ended:
    """How an episode ended. ``score`` None leaves it to the task's ``reward``.

    ``raised``: its own code failed. ``stuck``: something of it goes on and cannot be stopped.
    """

    number: int
    score: Scored | RewardFailure | None
    raised: bool = False
    stuck: bool = False


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises ``asyncio.IncompleteReadError`` when there is none any more."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def send(writer: asyncio.StreamWriter, message: object) -> None:
    """Send a message, without waiting."""
    data = pickle.dumps(message)
    writer.write(_LENGTH.pack(len(data)) + data)
