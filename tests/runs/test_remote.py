"""Every failure of an actor becomes one error that names it."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

from asyncrl_cli.core.errors import RunError, TaskError, UserError
from asyncrl_cli.spec.problems import Problem, SpecError
from asyncrl_cli.system.remote import ActorDied, NoAnswer, wait_for


async def raising(error: BaseException) -> Any:
    raise error


def raised_in_an_actor(cause: Exception) -> Exception:
    """The error that Ray raises in the driver."""
    error: Exception = RayTaskError("method", "traceback", cause).as_instanceof_cause()
    return error


async def failure(error: BaseException, timeout_s: float | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        await wait_for(raising(error), "engine-0", timeout_s)
    return caught.value


@pytest.mark.parametrize("timeout_s", [None, 60.0])
async def test_an_answer_is_passed_on(timeout_s: float | None) -> None:
    assert await wait_for(asyncio.sleep(0, 7), "engine-0", timeout_s) == 7


@pytest.mark.parametrize(
    "cause",
    [
        TaskError("the reward is not a number", location="task.use", hint="return one"),
        RunError("no room", location="trainer-0"),
        SpecError([Problem("seed", "is negative")]),
    ],
)
async def test_user_errors_are_unchanged(cause: Exception) -> None:
    error = await failure(raised_in_an_actor(cause))
    assert type(error) is type(cause)
    assert str(error) == str(cause)


async def test_a_bug_in_an_actor_names_actor_cause_and_log() -> None:
    error = await failure(raised_in_an_actor(ValueError("\n  bad shape\nand much more")))
    assert isinstance(error, RunError)
    assert str(error) == ("engine-0: ValueError: bad shape (see logs/engine-0.log in the run's folder)")
    assert str(await failure(raised_in_an_actor(KeyError()))).startswith("engine-0: KeyError: no message (")


async def test_a_dead_actor_is_named() -> None:
    error = await failure(ActorDiedError())
    assert isinstance(error, ActorDied)
    assert str(error).startswith("engine-0: the process died (see logs/engine-0.log")


async def test_no_answer_in_time() -> None:
    with pytest.raises(NoAnswer, match="engine-0: no answer within 0 s"):
        await wait_for(asyncio.Event().wait(), "engine-0", 0.01)


@pytest.mark.parametrize("timeout_s", [None, 600.0])
@pytest.mark.parametrize("error", [raised_in_an_actor(TimeoutError("slow")), GetTimeoutError("slow")])
async def test_a_timeout_inside_an_actor_or_of_ray_is_its_own(error: Exception, timeout_s: float | None) -> None:
    caught = await failure(error, timeout_s)
    assert not isinstance(caught, ActorDied | NoAnswer)
    assert re.match(r"engine-0: (Get)?TimeoutError: slow \(", str(caught))
