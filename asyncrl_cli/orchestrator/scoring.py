"""Scoring from the driver: every response gets a reward or a reason why it has none, whatever dies meanwhile.

The scorer actor handles what a reward function does. When the actor itself is killed or does not answer, it is
replaced, and the responses that it had are scored again, one by one and with nothing else under way; one that loses the
next actor as well has no reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.system.remote import ActorDied, ActorLost, wait_for
from asyncrl_cli.system.supervised_actor import RestartBudget, SupervisedActor
from asyncrl_cli.workers.scoring import Response

SCORER = "scorer"
"""Its name, which is that of its log file."""
AT_ONCE = 16
"""Responses that the actor may have at a time, to choose from; as many as its processes take, if these are more."""
ACTOR_S = 60.0
"""Seconds that the actor may take to answer a ping. What it does has limits of its own."""


class Scoring:
    """Keeps one scorer actor, made by ``make_actor``. ``score`` may be called from several tasks at a time.

    Both methods raise ``UserError`` when the task cannot be loaded (any more), and when too many actors were lost.
    """

    def __init__(self, task: TaskSpec, make_actor: Callable[[], Any], budget: RestartBudget) -> None:
        self._actor = SupervisedActor("scorer", SCORER, make_actor, _start, budget)
        self._calls = task.reward_workers * task.reward_concurrency
        self._at_once = max(AT_ONCE, self._calls)
        self._per_call = -(-self._at_once // self._calls)
        self._room = asyncio.Semaphore(self._at_once)
        self._entering = asyncio.Lock()

    async def start(self) -> None:
        """Have the task loaded, for who wants to know early that it can be."""
        await self._actor.running()

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
        async with self._room_for(len(responses)):
            try:
                return await self._ask(responses)
            except ActorLost:
                pass
        scored: list[Scored | RewardFailure] = []
        for response in responses:
            async with self._room_for(self._at_once):
                try:
                    scored += await self._ask([response])
                except ActorLost as lost:
                    scored.append(RewardFailure(f"{SCORER}: {lost.message}, twice with prompt {response[0].uid!r}"))
        return scored

    @asynccontextmanager
    async def _room_for(self, responses: int) -> AsyncIterator[None]:
        """Responses are counted, not calls: engines deliver rollouts by ones and twos, and a call at a time would bound
        the rewards of many engines by the time that a call takes to come back (decision 0043)."""
        taken = 0
        try:
            async with self._entering:  # two that take room bit by bit would wait for each other
                while taken < responses:
                    await self._room.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._room.release()

    async def _ask(self, responses: Sequence[Response]) -> list[Scored | RewardFailure]:
        return await self._actor.call(lambda actor: _answer(actor.score.remote(list(responses)), actor))


async def _start(actor: Any) -> None:
    await _answer(actor.start.remote(), actor)


async def _answer(call: Awaitable[Any], actor: Any) -> Any:
    """The answer of a call to the actor, as long as it shows that it is at work. Raises as ``wait_for`` does."""
    from ray.exceptions import RayError, RayTaskError

    answer = asyncio.ensure_future(wait_for(call, SCORER))
    try:
        while not (await asyncio.wait([answer], timeout=ACTOR_S))[0]:
            await wait_for(actor.ping.remote(), SCORER, ACTOR_S)
        return answer.result()
    except RunError as error:
        if isinstance(error.__cause__, RayError) and not isinstance(error.__cause__, RayTaskError):  # out of memory
            raise ActorDied("the process died", location=SCORER) from error
        raise
    finally:
        answer.cancel()
