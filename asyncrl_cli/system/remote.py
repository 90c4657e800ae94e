"""Waits for Ray calls, and raises every failure of an actor as an error that names the actor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any
from urllib.parse import urlsplit

from asyncrl_cli.core.errors import RunError, UserError

CONNECT_S = 10.0
"""Seconds for connecting to Ray's head."""
HEAD_LOOK_S = 0.5
"""Seconds between two checks of Ray's head."""
START_TIMEOUT_S = 600.0
"""Seconds that an actor may take for one part of its start."""
SLOWEST_BYTES_PER_S = 200e6
"""A slower disk or network counts as hanging: a run would not be worth its time with it."""


def seconds_for(nbytes: float) -> float:
    """Seconds that a time limit must allow for reading or writing this many bytes."""
    return nbytes / SLOWEST_BYTES_PER_S


class ActorLost(RunError):
    """An actor can no longer be used."""


class ActorDied(ActorLost):
    """The process of an actor has ended."""


class Unreachable(ActorDied):
    """The connection to an actor is lost, and Ray does not know its state yet: its node may be lost."""


class NoAnswer(ActorLost):
    """An actor did not answer in time."""


def on_node(node: str | None = None) -> Any:
    """The scheduling strategy for an actor on the Ray node with this id, by default on this process's node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node or ray.get_runtime_context().get_node_id(), soft=False)


async def head_answers() -> bool:
    """True if Ray's head accepts connections."""
    import ray

    head = urlsplit(f"//{ray.get_runtime_context().gcs_address}")
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(head.hostname, head.port)
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    return True


async def wait_for_head() -> None:
    """Wait until Ray's head answers. Call it before an actor is created: without a head ``A.remote()`` blocks the event
    loop for a minute, and then Ray ends this process without a message. ``while_ray_lives`` ends this wait."""
    import ray

    while ray.is_initialized() and not await head_answers():
        await asyncio.sleep(HEAD_LOOK_S)


async def wait_for(call: Awaitable[Any], who: str, timeout_s: float | None = None) -> Any:
    """The result of a Ray call to the actor ``who`` (the name of its log file).

    Raises the actor's own ``UserError`` unchanged, ``ActorDied``, ``NoAnswer`` after ``timeout_s`` seconds, and
    ``RunError`` for any other error of the actor.
    """
    from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError, RayTaskError

    hint = f"see logs/{who}.log in the run's folder"
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except RayTaskError as error:
        cause = getattr(error, "cause", error)
        if isinstance(cause, UserError):
            raise cause from None
        raise RunError(f"{type(cause).__name__}: {_first_line(cause)}", location=who, hint=hint) from error
    except ActorUnavailableError as error:
        raise Unreachable("the connection is lost", location=who, hint=hint) from error
    except (RayActorError, OutOfMemoryError) as error:
        raise ActorDied("the process died", location=who, hint=hint) from error
    except RayError as error:
        raise RunError(f"{type(error).__name__}: {_first_line(error)}", location=who, hint=hint) from error
    except TimeoutError:
        raise NoAnswer(f"no answer within {timeout_s:.0f} s", location=who, hint=hint) from None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"
