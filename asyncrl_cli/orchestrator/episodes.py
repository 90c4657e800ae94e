"""The driver's side of episodes: plays a rollout until it has a score or a failure (decision 0034).

Each attempt has its own session in the gateway, with its own URL and key. The session ends with the attempt, so later
requests of its agent are refused. The next attempt keeps the generated tokens, unless the agent itself failed; then the
episode restarts with other random numbers.

Invariant: ``play`` always returns. An attempt has limits (``task.episode``). Restarts after a failure of the agent
count against ``rollout.retries``. Restarts after the loss of a worker or of the gateway count against their restart
budgets. If a process with several episodes dies, any of them may be the cause, and each is isolated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from asyncrl_cli.core.seeds import derive_seed
from asyncrl_cli.gateway.actor import SessionEnd, SessionOpening
from asyncrl_cli.gateway.session import SessionLimits
from asyncrl_cli.orchestrator.gateway_client import GatewayClient, GatewayLost, RemoteSession
from asyncrl_cli.orchestrator.outside_sessions import OutsideSessions
from asyncrl_cli.orchestrator.scoring import Scoring
from asyncrl_cli.records.generation import Rollout, RolloutRequest, Sampling, Segment
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored, Turn
from asyncrl_cli.records.token_prefix import TokenPrefix
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.spec.inputs import EpisodeSpec, TaskSpec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.remote import ActorLost, wait_for
from asyncrl_cli.system.supervised_actor import RestartBudget, SupervisedActor
from asyncrl_cli.tasks.base import ModelAccess, ScoreLater
from asyncrl_cli.workers.messages import Played, Retry
from asyncrl_cli.workers.process import START_S

OnSegments = Callable[[list[Segment]], None]
Recorded = Mapping[int, tuple[Segment, ...]]
"""The recorded segments of a rollout, by branch."""

ISOLATED = 2
"""Number of a worker's processes for isolated episodes, which may have killed their process before. Each plays one
episode at a time."""
ACTOR_S = 60.0
"""Seconds that Ray may take to start an actor's process or to transfer an answer, without the actor's own time."""
STOP_S = 5.0
"""Seconds that a worker has to end its processes. The cluster's end kills the remaining ones."""
LOOK_S = 10.0
"""Seconds between two checks of a running episode."""


class EpisodeWorker(SupervisedActor):
    """An actor that plays episodes. It handles failures of agents and environments itself. If it is lost, other workers
    continue its episodes."""

    def __init__(self, name: str, make_actor: Callable[[str], Any], budget: RestartBudget, limit_s: float) -> None:
        """``limit_s``: seconds that an episode may take."""
        super().__init__("episode-worker", name, partial(make_actor, name), self._start, budget)
        self.episodes = 0  # number of episodes that it plays now
        self._limit_s = limit_s

    async def _start(self, actor: Any) -> None:
        await wait_for(actor.start.remote(), self.name, START_S + ACTOR_S)

    async def play(self, key: str, prompt: Prompt, access: ModelAccess, isolated: bool) -> Played:
        """Play an episode with a unique key. Cancelling the call stops the episode. Raises ``UserError`` if the task
        can no longer be loaded, or the worker was lost too often."""

        async def play(actor: Any) -> Played:
            try:
                played: Played = await wait_for(
                    actor.play.remote(key, prompt, access, isolated), self.name, self._limit_s
                )
            except asyncio.CancelledError:
                actor.cancel.remote([key])
                raise
            return played

        try:
            return await self.call(play)
        except ActorLost as lost:
            return Played(RewardFailure(f"{self.name}: {lost.message}"), Retry.RESUME)


class EpisodeWorkers:
    """All workers of one task, and their slots for episodes."""

    continues_programs = False
    """Episodes do not outlive the loss of the gateway or the driver: they begin again, and repeat their calls."""

    def __init__(self, spec: EpisodeSpec, make_actor: Callable[[str], Any], budget: RestartBudget, name: str) -> None:
        """``make_actor(name)`` creates a worker's Ray actor. ``name`` is the prefix of the workers' names."""
        limit_s = spec.timeout_s + START_S + ACTOR_S
        self._workers = [
            EpisodeWorker(f"{name}-{index}", make_actor=make_actor, budget=budget, limit_s=limit_s)
            for index in range(spec.workers)
        ]
        self._slots = asyncio.Semaphore(spec.workers * spec.concurrency)
        self._isolated = asyncio.Semaphore(spec.workers * ISOLATED)

    async def start(self) -> None:
        """Start all workers and load the task in them. Raises ``UserError`` if it cannot be loaded."""
        await asyncio.gather(*(worker.running() for worker in self._workers))

    @asynccontextmanager
    async def slot(self, isolated: bool) -> AsyncIterator[EpisodeWorker]:
        """Wait for a worker with a free slot. ``isolated``: a slot in a process without other episodes."""
        async with self._isolated if isolated else self._slots:
            worker = min(self._workers, key=lambda worker: worker.episodes)
            worker.episodes += 1
            try:
                yield worker
            finally:
                worker.episodes -= 1

    def conclude(self, rollout_id: str) -> None:
        """Nobody waits for the record."""

    async def stop(self) -> None:
        """End all processes, in bounded time."""
        calls = [
            wait_for(worker.actor.stop.remote(), worker.name, STOP_S) for worker in self._workers if worker.started
        ]
        await asyncio.gather(*calls, return_exceptions=True)


@dataclass(eq=False)
class Episodes:
    """Plays the episodes of one task."""

    spec: ExperimentSpec
    task: TaskSpec
    client: GenerationClient
    gateway: GatewayClient
    workers: EpisodeWorkers | OutsideSessions
    scoring: Scoring
    on_progress: Callable[[], None] = lambda: None
    """Called when an episode ends, and now and then while episodes run that do not wait for the policy: their tools may
    take long, within limits."""
    _open: int = 0
    _calls: int = 0

    def __post_init__(self) -> None:
        self._limits = SessionLimits(
            max_length=self.spec.model.max_length,
            max_call_tokens=self.spec.rollout.max_response_tokens,
            max_calls=self.task.episode.max_calls,
            max_sampled_tokens=self.task.episode.max_tokens,
        )

    @property
    def resting(self) -> int:
        """Number of running episodes without a request to the policy."""
        return max(0, self._open - self._calls)

    async def play(
        self,
        rollout_id: str,
        prompt: Prompt,
        sampling: Sampling,
        priority: int = 0,
        recorded: Recorded | None = None,
        record: OnSegments | None = None,
    ) -> tuple[Rollout | None, Scored | RewardFailure]:
        """Play one episode; returns its rollout (None if the policy sampled no token), and its score or failure.

        ``sampling`` applies to each call of the model, with a seed derived from it; its ``max_tokens`` limit one call.
        Calls with a lower ``priority`` run first. ``recorded``: the rollout's tokens from an earlier driver. ``record``
        gets all new tokens. Cancelling the call stops the episode. Raises ``UserError`` if the task can no longer be
        loaded, or a part of the run died too often.
        """
        prefixes = {branch: TokenPrefix(segments) for branch, segments in (recorded or {}).items()}
        attempts, restarts, isolated = 0, 0, False
        continues = self.workers.continues_programs
        self._open += 1
        try:
            while True:
                seed = sampling.seed
                if seed is not None and restarts:
                    seed = derive_seed(seed, "attempt", restarts)  # the same tokens would fail again
                opening = SessionOpening(
                    name=f"{rollout_id}~{attempts}" if attempts and not continues else rollout_id,
                    rollout_id=rollout_id,
                    sampling=replace(sampling, seed=seed),
                    limits=replace(self._limits, max_call_tokens=sampling.max_tokens),
                    priority=priority,
                    recorded={branch: tuple(prefix.segments) for branch, prefix in prefixes.items()},
                    continues=continues,
                )
                on_segments = partial(_add_tokens, rollout_id, prefixes, record)
                played, end = await self._attempt(opening, on_segments, prompt=prompt, isolated=isolated)
                attempts += 1
                if played.retry is Retry.RESTART and restarts < self.spec.rollout.retries:
                    restarts += 1
                    prefixes = {}
                elif played.retry in (Retry.RESUME, Retry.ISOLATED):
                    isolated = isolated or played.retry is Retry.ISOLATED
                else:
                    return await self._judged(prompt, end, played)
        finally:
            self._open -= 1
            self.client.room.set()  # a resting episode has kept its slot
            self.on_progress()

    def conclude(self, rollout_id: str) -> None:
        """A training rollout has ended. The journal has its score or failure, unless its group ended without it."""
        self.workers.conclude(rollout_id)

    async def _attempt(
        self, opening: SessionOpening, on_segments: OnSegments, prompt: Prompt, isolated: bool
    ) -> tuple[Played, SessionEnd]:
        try:
            async with (
                self.workers.slot(isolated) as worker,
                self.gateway.session(opening, on_segments, self._generate) as session,
            ):
                playing = worker.play(opening.name, prompt, session.access, isolated)
                played = await self._watched(playing, session)
                return played, await session.finish()
        except GatewayLost as lost:  # even if the agent has a result: its tokens are not known without the session
            return Played(RewardFailure(f"the gateway: {lost}"), Retry.RESUME), SessionEnd(opening.session_number)

    async def _watched(self, playing: Coroutine[Any, Any, Played], session: RemoteSession) -> Played:
        """The result of ``playing``. Raises ``GatewayLost`` immediately when the gateway is lost."""
        episode = asyncio.create_task(playing)
        awaited: set[asyncio.Future[Any]] = {episode, session.end}
        try:
            while not (await asyncio.wait(awaited, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED))[0]:
                if self.resting:
                    self.on_progress()
            if not episode.done():
                session.end.result()
            return await episode
        finally:
            episode.cancel()

    async def _judged(
        self, prompt: Prompt, end: SessionEnd, played: Played
    ) -> tuple[Rollout | None, Scored | RewardFailure]:
        rollout, score = end.rollout, played.score
        if rollout is None and not isinstance(score, RewardFailure):
            nothing = f": {end.failure}" if end.failure else ""
            score = RewardFailure(f"the episode of prompt {prompt.uid!r} got no reply from the model{nothing}")
        if score is None or isinstance(score, ScoreLater):
            assert rollout is not None
            metrics = {} if score is None else score.metrics
            (score,) = await self.scoring.score([(prompt, end.last_text, rollout.finished)])
            if metrics and isinstance(score, Scored):
                score = Scored(score.reward, {**metrics, **score.metrics})
        if isinstance(score, Scored) and score.turns:
            if len(score.turns) != len(end.replies):
                reason = f"the environment of prompt {prompt.uid!r} took {len(score.turns)} steps after"
                return rollout, RewardFailure(f"{reason} {len(end.replies)} replies from the model")
            turns = (Turn(turn.reward, *place) for turn, place in zip(score.turns, end.replies, strict=True))
            score = replace(score, turns=tuple(turns))
        return rollout, score

    async def _generate(self, request: RolloutRequest, on_segments: OnSegments | None = None) -> Rollout:
        self._calls += 1
        try:
            return await self.client.generate(request, on_segments)
        finally:
            self._calls -= 1


def _add_tokens(
    rollout_id: str, prefixes: dict[int, TokenPrefix], record: OnSegments | None, segments: list[Segment]
) -> None:
    """Add new tokens to a rollout's sequences, by branch, and record them."""
    for segment in segments:
        branch = int(segment.rollout_id.removeprefix(rollout_id)[1:] or 0)  # of ``branch_id``
        prefixes.setdefault(branch, TokenPrefix()).add(segment)
    if record is not None:
        record(segments)
