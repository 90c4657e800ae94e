"""Scoring from the driver: every response gets a reward or a reason why it has none, whatever dies meanwhile.

The scorer actor sees to what a reward function does. Here is what can befall the actor: it is killed, or it does
not answer. Then it is replaced, and the responses that it had are scored again, one by one and with nothing else
under way; one that loses the next actor as well has no reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator.restart_budget import RestartBudget
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.system.remote import NoAnswer, wait_for
from asyncrl_cli.workers.scoring import Response, RewardFailure, Scored

SCORER = "scorer"
"""Its name, which is that of its log file."""
AT_ONCE = 16
"""Responses that the actor has at least, to choose from; as many as its processes take, if these are more."""
ACTOR_S = 60.0
"""Seconds that the actor may take to show that it is at work. All that it does has limits of its own."""


class _Lost(Exception):
    """The actor is of no use any more; says why."""


class Scoring:
    """Keeps one scorer actor, made by ``make_actor``. ``score`` may be called from several tasks at a time.

    Both methods raise ``UserError`` when the task cannot be loaded (any more), and when too many actors were lost.
    """

    def __init__(self, task: TaskSpec, make_actor: Callable[[], Any], budget: RestartBudget) -> None:
        self._make_actor = make_actor
        self._budget = budget
        self._actor: Any = None
        self._starting = asyncio.Lock()
        self._calls = task.reward_workers * task.reward_concurrency
        self._per_call = -(-AT_ONCE // self._calls)
        self._turns = asyncio.Semaphore(self._calls)
        self._alone = asyncio.Lock()

    async def start(self) -> None:
        """Have the task loaded, for who wants to know early that it can be."""
        await self._running()

    async def score(self, responses: Sequence[Response]) -> list[Scored | RewardFailure]:
        """What every response scores, in order.

        Callers take turns, so that an evaluation does not hold training up.
        """
        scored: list[Scored | RewardFailure] = [RewardFailure("")] * len(responses)
        starts = iter(range(0, len(responses), self._per_call))

        async def work(starts: Iterator[int]) -> None:
            for start in starts:
                end = start + self._per_call
                scored[start:end] = await self._score_some(responses[start:end])

        workers = [asyncio.ensure_future(work(starts)) for _ in range(min(self._calls, len(responses)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
        return scored

    async def _score_some(self, responses: Sequence[Response]) -> list[Scored | RewardFailure]:
        async with self._turns:
            try:
                return await self._ask(responses)
            except _Lost:
                pass
        scored: list[Scored | RewardFailure] = []
        for response in responses:
            async with self._all_turns():
                try:
                    scored += await self._ask([response])
                except _Lost as lost:
                    scored.append(RewardFailure(f"{SCORER}: {lost}, twice with prompt {response[0].uid!r}"))
        return scored

    @asynccontextmanager
    async def _all_turns(self) -> AsyncIterator[None]:
        taken = 0
        try:
            async with self._alone:  # two that collect turns would wait for each other
                while taken < self._calls:
                    await self._turns.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._turns.release()

    async def _ask(self, responses: Sequence[Response]) -> list[Scored | RewardFailure]:
        """What the actor says. When it is lost it is given up, once however many were waiting for it."""
        actor = await self._running()
        try:
            scored: list[Scored | RewardFailure] = await _answer(actor.score.remote(list(responses)), actor)
        except _Lost as lost:
            await self._abandon(actor, lost)
            raise
        return scored

    async def _running(self) -> Any:
        """The actor, started if there is none."""
        async with self._starting:
            while self._actor is None:
                actor = self._actor = self._make_actor()
                try:
                    await _answer(actor.start.remote(), actor)
                except _Lost as lost:
                    await self._abandon(actor, lost)
                except BaseException:
                    self._kill()
                    raise
            return self._actor

    async def _abandon(self, actor: Any, lost: _Lost) -> None:
        if actor is self._actor:
            self._kill()
            await self._budget.spend("scorer", SCORER, str(lost))

    def _kill(self) -> None:
        import ray

        actor, self._actor = self._actor, None
        ray.kill(actor)


async def _answer(call: Awaitable[Any], actor: Any) -> Any:
    """The answer of a call to the actor, as long as it shows that it is at work.

    Raises ``_Lost``, or what ``wait_for`` raises of all else.
    """
    answer = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait([answer], timeout=ACTOR_S))[0]:
            await _done(actor.ping.remote(), ACTOR_S)
        return await _done(answer, None)
    finally:
        answer.cancel()


async def _done(call: Awaitable[Any], limit_s: float | None) -> Any:
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
