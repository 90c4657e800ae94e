"""Scoring from the driver: every response gets a reward or a reason why it has none, whatever dies meanwhile.

The scorer actor sees to what a reward function does. Here is what can befall the actor: it is killed, or it does
not answer. Then it is replaced, and the responses of that call are scored again one by one; one that loses the next
actor as well has no reward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from asyncrl_cli.pipeline.faults import Faults
from asyncrl_cli.runs.directory import RunError
from asyncrl_cli.runs.remote import NoAnswer, wait_for
from asyncrl_cli.spec.sections import TaskSpec
from asyncrl_cli.tasks.reward_process import START_S
from asyncrl_cli.tasks.scoring import Response, RewardFailure, Scored

SCORER = "scorer"
"""Its name, which is that of its log file."""
AT_ONCE = 16
"""Responses in one call of the actor: callers take turns, so that an evaluation does not hold training up."""
ACTOR_S = 60.0
"""Seconds that Ray may take for an actor's process or an answer's way, beside what the actor does itself."""
SLACK = 5.0
"""A call may start the reward's process twice; together that may take so many times what the first start took."""


class _Lost(Exception):
    """The actor is of no use any more; says why."""


class Scoring:
    """Keeps one scorer actor, made by ``make_actor``. ``score`` may be called from several tasks at a time.

    Both methods raise ``UserError`` when the task cannot be loaded (any more), and when too many actors were lost.
    """

    def __init__(self, task: TaskSpec, make_actor: Callable[[], Any], faults: Faults) -> None:
        self._task = task
        self._make_actor = make_actor
        self._faults = faults
        self._actor: Any = None
        self._start_s = 0.0
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Have the task loaded, for who wants to know early that it can be."""
        async with self._turn:
            await self._running()

    async def score(self, responses: Sequence[Response]) -> list[Scored | RewardFailure]:
        """What every response scores, in order."""
        scored: list[Scored | RewardFailure] = []
        while len(scored) < len(responses):
            async with self._turn:
                scored += await self._score_some(responses[len(scored) : len(scored) + AT_ONCE])
        return scored

    async def _score_some(self, responses: Sequence[Response]) -> list[Scored | RewardFailure]:
        try:
            return await self._ask(responses)
        except _Lost as lost:
            await self._give_up(lost)
        scored: list[Scored | RewardFailure] = []
        for response in responses:
            try:
                scored += await self._ask([response])
            except _Lost as lost:
                await self._give_up(lost)
                scored.append(RewardFailure(f"{SCORER}: {lost}, twice with prompt {response[0].uid!r}"))
        return scored

    async def _ask(self, responses: Sequence[Response]) -> list[Scored | RewardFailure]:
        actor = await self._running()
        limit_s = (len(responses) + 1) * self._task.reward_timeout_s + SLACK * self._start_s + ACTOR_S
        scored: list[Scored | RewardFailure] = await _answer(actor.score.remote(list(responses)), limit_s)
        return scored

    async def _running(self) -> Any:
        """The actor, started if there is none."""
        while self._actor is None:
            self._actor = self._make_actor()
            started = time.monotonic()
            try:
                await _answer(self._actor.start.remote(), START_S + ACTOR_S)
                self._start_s = time.monotonic() - started
            except _Lost as lost:
                await self._give_up(lost)
            except BaseException:
                self._kill()
                raise
        return self._actor

    async def _give_up(self, lost: _Lost) -> None:
        self._kill()
        await self._faults.restarting("scorer", SCORER, str(lost))

    def _kill(self) -> None:
        import ray

        actor, self._actor = self._actor, None
        ray.kill(actor)


async def _answer(call: Awaitable[Any], limit_s: float) -> Any:
    """The answer of a call to the actor. Raises ``_Lost``, or what ``wait_for`` raises of all else."""
    from ray.exceptions import RayError, RayTaskError

    try:
        return await wait_for(call, SCORER, limit_s)
    except NoAnswer:
        raise _Lost(f"no answer within {limit_s:.0f} s") from None
    except RunError as error:
        cause = error.__cause__
        if isinstance(cause, RayError) and not isinstance(cause, RayTaskError):  # killed, or out of memory
            raise _Lost("the process died") from error
        raise
