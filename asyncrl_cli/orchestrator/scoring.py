"""The driver's side of scoring: every response gets a reward, or a reason why it has none.

The scorer actor handles failures of reward functions. If the actor itself dies or does not answer, it is replaced, and
its responses are scored again, each alone, because any of them may be the cause. A response that is alone when the next
actor is lost has no reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.system.remote import ActorLost, wait_for
from asyncrl_cli.system.supervised_actor import RestartBudget, SupervisedActor
from asyncrl_cli.tasks.base import scores_groups, task_of
from asyncrl_cli.workers.scoring import Answer, Response

SCORER = "scorer"
"""The name of the actor and of its log file."""
AT_ONCE = 16
"""Smallest number of responses that the actor may have at a time; more if its processes can score more."""
ACTOR_S = 60.0
"""Seconds that the actor may take to answer a ping. Rewards have their own time limit."""


class Scoring:
    """Scores responses with an actor from ``make_actor``. Several tasks may call ``score`` at a time.

    Raises ``UserError`` if the task cannot be loaded (any more), and if too many actors were lost.
    """

    def __init__(
        self, task: TaskSpec, make_actor: Callable[[], Any], budget: RestartBudget, task_object: object
    ) -> None:
        """``task_object``: the loaded task, which decides whether responses are scored together."""
        self._task_object = task_object
        self._actor = SupervisedActor("scorer", name=SCORER, make=make_actor, start=_start, budget=budget)
        self._calls = task.reward_workers * task.reward_concurrency
        self._at_once = max(AT_ONCE, self._calls)
        self._per_call = -(-self._at_once // self._calls)
        self._room = asyncio.Semaphore(self._at_once)
        self._entering = asyncio.Lock()
        self.on_progress: Callable[[], None] = lambda: None
        """Called when responses have got their scores."""
        self.unscored = 0
        """Number of responses that wait for their scores."""

    async def start(self) -> None:
        """Start the actor and load the task, to report an error in the task early."""
        await self._actor.running()

    def sees_group(self, prompt: Prompt) -> bool:
        """True if the responses to this prompt are scored together."""
        return scores_groups(task_of(self._task_object, prompt)[0])

    async def score(self, responses: Sequence[Response]) -> list[Scored | RewardFailure]:
        """The score of each text of each response, in order. A group's failure is the failure of each of its texts.

        Concurrent callers take turns, because an evaluation must not delay training.
        """
        scored: list[Answer] = [RewardFailure("")] * len(responses)
        starts = iter(range(0, len(responses), self._per_call))

        async def score_slices(starts: Iterator[int]) -> None:
            for start in starts:
                end = start + self._per_call
                scored[start:end] = await self._score_some(responses[start:end])
                self.on_progress()

        self.unscored += len(responses)
        workers = [asyncio.ensure_future(score_slices(starts)) for _ in range(min(self._calls, len(responses)))]
        try:
            await asyncio.gather(*workers)
        finally:
            self.unscored -= len(responses)
            for worker in workers:
                worker.cancel()
        return [
            score
            for (_, text, _), answer in zip(responses, scored, strict=True)
            for score in (
                answer if isinstance(answer, tuple) else [answer] * (1 if isinstance(text, str) else len(text))
            )
        ]

    async def _score_some(self, responses: Sequence[Response]) -> list[Answer]:
        async with self._room_for(len(responses)):
            try:
                return await self._ask(responses)
            except ActorLost:
                pass
        scored: list[Answer] = []
        for response in responses:
            async with self._room_for(self._at_once):
                try:
                    scored += await self._ask([response])
                except ActorLost as lost:
                    scored.append(RewardFailure(f"{SCORER}: {lost.message}, twice with prompt {response[0].uid!r}"))
        return scored

    @asynccontextmanager
    async def _room_for(self, responses: int) -> AsyncIterator[None]:
        """Wait until the actor has room for this many responses. It limits responses, not calls: many engines deliver
        one or two rollouts at a time, and the latency of one call at a time would limit them (decision 0006)."""
        acquired_count = 0
        try:
            async with self._entering:  # two callers that each have a part of the room could deadlock
                while acquired_count < responses:
                    await self._room.acquire()
                    acquired_count += 1
            yield
        finally:
            for _ in range(acquired_count):
                self._room.release()

    async def _ask(self, responses: Sequence[Response]) -> list[Answer]:
        return await self._actor.call(lambda actor: _answer(actor.score.remote(list(responses)), actor))


async def _start(actor: Any) -> None:
    await _answer(actor.start.remote(), actor)


async def _answer(call: Awaitable[Any], actor: Any) -> Any:
    """The answer of a call, which may take any time while the actor answers pings. Raises like ``wait_for``."""
    answer = asyncio.ensure_future(wait_for(call, SCORER))
    try:
        while not (await asyncio.wait([answer], timeout=ACTOR_S))[0]:
            await wait_for(actor.ping.remote(), SCORER, ACTOR_S)
        return answer.result()
    finally:
        answer.cancel()
