"""Every failure of an actor becomes one error that names it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

from asyncrl_cli.core.errors import RunError, TaskError, UserError
from asyncrl_cli.spec.problems import Problem, SpecError
from asyncrl_cli.system.remote import ActorDied, NoAnswer, wait_for


async def raising(error: BaseException) -> Any:
    raise error


def raised_in_an_actor(cause: Exception) -> BaseException:
    """The error that Ray raises in the driver."""
    error: BaseException = RayTaskError("method", "traceback", cause).as_instanceof_cause()
    return error


def failure(error: BaseException, timeout_s: float | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        asyncio.run(wait_for(raising(error), "engine-0", timeout_s))
    return caught.value


def test_an_answer_is_passed_on() -> None:
    async def answer() -> int:
        return 7

    assert asyncio.run(wait_for(answer(), "engine-0")) == 7
    assert asyncio.run(wait_for(answer(), "engine-0", 60.0)) == 7


@pytest.mark.parametrize(
    "cause",
    [
        TaskError("the reward is not a number", location="task.use", hint="return one"),
        RunError("no room", location="trainer-0"),
        SpecError([Problem("seed", "is negative")]),
    ],
)
def test_user_errors_are_unchanged(cause: Exception) -> None:
    error = failure(raised_in_an_actor(cause))
    assert type(error) is type(cause)
    assert str(error) == str(cause)


def test_a_bug_in_an_actor_names_actor_cause_and_log() -> None:
    error = failure(raised_in_an_actor(ValueError("\n  bad shape\nand much more")))
    assert isinstance(error, RunError)
    assert str(error) == ("engine-0: ValueError: bad shape (see logs/engine-0.log in the run's folder)")
    assert str(failure(raised_in_an_actor(KeyError()))).startswith("engine-0: KeyError: no message (")


def test_a_dead_actor_is_named() -> None:
    error = failure(ActorDiedError())
    assert isinstance(error, ActorDied)
    assert str(error).startswith("engine-0: the process died (see logs/engine-0.log")


def test_no_answer_in_time() -> None:
    async def never() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(NoAnswer, match="engine-0: no answer within 0 s"):
        asyncio.run(wait_for(never(), "engine-0", 0.01))


@pytest.mark.parametrize("timeout_s", [None, 600.0])
def test_a_timeout_inside_an_actor_is_its_own(timeout_s: float | None) -> None:
    error = failure(raised_in_an_actor(TimeoutError("the store did not answer")), timeout_s)
    assert not isinstance(error, NoAnswer)
    assert str(error).startswith("engine-0: TimeoutError: the store did not answer (")


def test_rays_own_timeout() -> None:
    error = failure(GetTimeoutError("slow"))
    assert not isinstance(error, ActorDied | NoAnswer)
    assert str(error).startswith("engine-0: GetTimeoutError: slow (")
