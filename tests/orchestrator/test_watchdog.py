"""The watchdog warns at half the limit, and at the limit raises an error with all waits and their starts.

The tests do not sleep: a wait begins in the past, and the watchdog checks in every iteration of the event loop.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator.watchdog import TRAINER, Wait, Watchdog

LIMIT_S = 1000.0
LOOKS = 20
"""Enough iterations of the event loop for several checks of the watchdog."""


@pytest.fixture(autouse=True)
def _look_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl_cli.orchestrator.watchdog.LONGEST_LOOK_S", 0.0)


class Harness:
    """A watchdog, and its warnings."""

    def __init__(self) -> None:
        self.warned: list[str] = []
        self.recorded: list[Wait] = []
        self.dog = Watchdog(LIMIT_S, self.warned.append, self._record)

    async def _record(self, wait: Wait) -> None:
        self.recorded.append(wait)

    @contextmanager
    def waiting(self, who: str, what: str, ago_s: float) -> Iterator[Wait]:
        with self.dog.waiting(who, what) as wait:
            wait.since -= ago_s
            yield wait

    async def look(self) -> None:
        """Let it check a few times; raises its errors."""
        watching = asyncio.create_task(self.dog.watch())
        for _ in range(LOOKS):
            await asyncio.sleep(0)
        if watching.done():
            group = watching.exception()
            assert isinstance(group, ExceptionGroup)
            raise group.exceptions[0]
        watching.cancel()


def look(*waits: tuple[str, str, float]) -> list[str]:
    """The warnings about waits. The numbers are elapsed fractions of the limit."""

    async def check() -> list[str]:
        harness = Harness()
        with ExitStack() as stack:
            for who, what, part in waits:
                stack.enter_context(harness.waiting(who, what, part * LIMIT_S))
            await harness.look()
        return harness.warned

    return asyncio.run(check())


def test_half_the_limit_is_reported_once() -> None:
    (warned,) = look(("the trainer", "a batch", 0.6), ("the scorer", "a turn", 0.1))
    assert re.fullmatch(r"the trainer has waited for a batch since \d\d:\d\d:\d\d \(60\d s\)", warned)


def test_at_the_limit_the_run_ends_with_all_waits_the_oldest_first() -> None:
    with pytest.raises(RunError) as error:
        look(
            ("the scorer", "a turn", 0.1),
            ("the trainer", "the batch of step 7", 1.2),
            ("the driver", "every engine", 1.1),
        )
    assert error.value.location == "pipeline"
    first, *others = error.value.message.split("; ")
    assert re.fullmatch(
        r"no progress: the trainer has waited for the batch of step 7 since \d\d:\d\d:\d\d \(120\d s\)", first
    )
    assert sorted(other.split(" since ")[0] for other in others) == [
        "the driver has waited for every engine",
        "the scorer has waited for a turn",
    ]
    assert "asyncrl resume" in error.value.hint


async def test_waits_that_depend_on_the_models_size_have_longer_limits() -> None:
    harness = Harness()
    with harness.dog.waiting("the trainer", "a checkpoint", extra_s=LIMIT_S) as wait:
        wait.since -= 0.9 * LIMIT_S
        await harness.look()
        assert harness.warned == []
        wait.since -= LIMIT_S
        await harness.look()
        assert len(harness.warned) == 1
        wait.since -= LIMIT_S
        with pytest.raises(RunError, match="a checkpoint"):
            await harness.look()


async def test_tokens_are_progress_for_waits_for_generation_and_a_repeated_step_for_all() -> None:
    harness = Harness()
    with pytest.raises(ValueError, match="oh"), harness.waiting("the trainer", "a wait that is over", 2 * LIMIT_S):
        raise ValueError("oh")
    with harness.waiting(TRAINER, "a batch", 2 * LIMIT_S) as wait:
        harness.dog.progress()
        await harness.look()
        assert harness.warned == []
        wait.since -= 0.6 * LIMIT_S
        await harness.look()
        with harness.waiting("the driver", "every engine", 2 * LIMIT_S):
            harness.dog.caught_up()
            wait.since -= 0.6 * LIMIT_S
            await harness.look()
            assert harness.recorded == [wait, wait], "it is reported again after progress"
        with harness.waiting("the driver", "every engine", 2 * LIMIT_S):
            harness.dog.progress()
            with pytest.raises(RunError, match="no progress: the driver has waited for every engine"):
                await harness.look()
