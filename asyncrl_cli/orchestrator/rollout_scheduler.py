"""Turns prompts into requests or episodes, and has their rollouts scored and recorded.

Only the buffer decides how many groups may start and when a group is finished. This module keeps the engines as busy as
the buffer allows, and has the buffer record every token before anything depends on it (decision 0013).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.core.seeds import derive_seed
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.orchestrator.episodes import Episodes, Recorded
from asyncrl_cli.orchestrator.prompt_source import PromptSource
from asyncrl_cli.orchestrator.scoring import Scoring
from asyncrl_cli.records.generation import (
    Rollout,
    RolloutFailure,
    RolloutRequest,
    Sampling,
    Segment,
    group_and_index,
    training_rollout_id,
)
from asyncrl_cli.records.groups import Group, Opening, Outcome, Settled
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.rollout.open_requests import EndedRequests
from asyncrl_cli.rollout.response_text import cut
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.workers.scoring import Response, responses_of

Spawn = Callable[[Coroutine[Any, Any, object]], object]

ADMIT_S = 0.02
"""Seconds between two admissions: groups that end shortly after each other are replaced with one call and commit."""
SETTLE_S = 0.02
"""Longest time in seconds that finished rollouts wait for the running scoring call, to be scored together."""
SCORE_TIMEOUT_S = 0.2
"""Seconds that finished rollouts wait for their rewards before they are recorded without them."""
RECENT_GROUPS = 100
"""Number of recently ended groups from which the share of failures is computed."""
MIN_FAILURES = 8
"""Smallest number of failures among them that ends the run, unless no failure is allowed."""
REJECTION_TEXTS = {
    "failed": "a rollout failed",
    "uniform": "all rewards of the group are equal",
    "unscored": "its reward returned None for too many responses, so fewer than two have one",
}
"""Why a group is rejected, by the ledger's reason."""
UNSCORED_FAILURE = RewardFailure(REJECTION_TEXTS["unscored"], "task")


def rollout_seed(seed: int, group_id: int, index: int) -> int:
    """The sampling seed of a rollout. A rollout that runs again, on any engine, has the same seed."""
    return derive_seed(seed, group_id, index)


class RecentFailures:
    """Failures among the last ``RECENT_GROUPS`` groups. A count over the whole run would end long runs at a share of
    failures that short runs survive."""

    def __init__(self, max_share: float) -> None:
        """``max_share``: 0 allows no failure, 1 any number."""
        self._max_share = max_share
        self._recent: deque[RewardFailure | None] = deque(maxlen=RECENT_GROUPS)

    @property
    def recent(self) -> list[RewardFailure]:
        """The failures, oldest first."""
        return [failure for failure in self._recent if failure is not None]

    def count_group(self, failure: RewardFailure | None = None) -> None:
        """Count a group that ended, or was lost to ``failure``."""
        self._recent.append(failure)

    def too_many(self) -> str:
        """The number of failures and the first reason, if there are too many; otherwise empty."""
        failures = self.recent
        if len(failures) <= self._max_share * len(self._recent) or (self._max_share and len(failures) < MIN_FAILURES):
            return ""
        return (
            f"{len(failures)} of the last {len(self._recent)} groups were lost; "
            f"the first of them: {failures[0].reason or 'unknown'}"
        )


@dataclass(slots=True, eq=False)
class RolloutScheduler:
    """Starts groups while the buffer has room and the engines have slots, and follows their rollouts to their end.

    Two tasks share the work: ``_admit`` requests rollouts, ``_settle`` has them scored and recorded. Each episode has
    its own task, which does both.
    """

    spec: ExperimentSpec
    buffer: Buffer
    client: GenerationClient
    scoring: Scoring
    prompts: PromptSource
    spawn: Spawn
    """Starts a coroutine whose failure ends the run."""
    episodes: Episodes | None = None
    """Plays groups without prompt ids: their task calls the model itself."""
    warn: Callable[[str], None] = lambda _: None
    failures: RecentFailures = field(init=False)
    """Groups recently lost to failed rollouts or missing rewards."""
    rejected_in_a_row: Counter[str] = field(default_factory=Counter)
    """Rejections since a group finished, by reason."""
    _lost: int = 0  # number of groups lost to failed rollouts or missing rewards
    _episode_tasks: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    _generated: asyncio.Queue[Rollout] = field(default_factory=asyncio.Queue)
    _sampling: Sampling = field(init=False)
    _open: dict[int, Group] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rollout = self.spec.rollout
        self.failures = RecentFailures(rollout.max_failed_share)
        self._sampling = Sampling(
            temperature=rollout.sampling.temperature,
            max_tokens=rollout.max_response_tokens,
            stop=tuple(rollout.sampling.stop),
        )

    def resume(self, opening: Opening) -> None:
        """Continue the journal's groups, at the start."""
        self.prompts.resume(opening.serial, opening.loader)
        if self.prompts.filter is not None:
            self.prompts.filter.restore(opening.solved)
        for group in opening.groups:
            self._start(group)
        self.client.room.set()

    async def run(self) -> None:
        """Admit groups whenever there is room for them, and settle their rollouts. Never ends."""
        await asyncio.gather(self._admit(), self._settle())

    async def requeue(self, overdue: tuple[int, ...]) -> None:
        """With the policy ``requeue``, abandon the groups that delay a batch, and start their prompts again."""
        for old_id, group_id, version in await self.buffer.requeue(overdue):
            abandoned = self._open.pop(old_id)
            # Start before the cancellation: otherwise ``_admit`` could give the freed slots to a new group.
            self._start(
                replace(abandoned, group_id=group_id, version=version, scored=frozenset(), unscored={}, prefixes={})
            )
            await self._cancel(old_id)

    async def _admit(self) -> None:
        while True:
            await self.client.room.wait()
            self.client.room.clear()
            # Episodes between two calls of the model have no request now, but will need their slots again. Those that
            # were started before this turn of the event loop have begun.
            resting = self.episodes.resting if self.episodes is not None else 0
            slots = max(0, self.client.free - resting)
            room = min(self.buffer.room(), self.prompts.wanted_groups)
            if group_count := min(slots // self.spec.rollout.group_size, room):
                # Asked again after the wait: a publish or a batch may have changed the room.
                count = min(await self.prompts.prepare(group_count), self.buffer.room())
                if count < group_count:
                    self.client.room.set()  # try again for the rest
                candidates = [self.prompts.candidate() for _ in range(count)]
                for group in await self.buffer.admit(candidates):
                    self._start(group)
                await asyncio.sleep(ADMIT_S)

    def _start(self, group: Group) -> None:
        """Request a group's missing rollouts, and queue its finished rollouts without a reward for scoring."""
        self._open[group.group_id] = replace(group, unscored={}, prefixes={})
        for index in range(self.spec.rollout.group_size):
            if index in group.scored or index in group.unscored:
                continue
            recorded = group.prefixes.get(index, {})
            request = RolloutRequest(
                training_rollout_id(group.group_id, index),
                prompt_ids=group.prompt_ids,
                sampling=replace(self._sampling, seed=rollout_seed(self.spec.seed, group.group_id, index)),
                prefix=recorded.get(0, ()),
                priority=group.group_id,
                affinity=str(group.group_id),
                images=group.images,
            )
            if group.prompt_ids:
                self.client.enqueue([request], self._on_end, self._record_segments)
            elif self.episodes is not None:
                self.spawn(self._play(self.episodes, group=group, request=request, recorded=recorded))
        for rollout in group.unscored.values():
            text = cut(self.client.decode(rollout.ids), self._sampling.stop)
            self._generated.put_nowait(replace(rollout, text=text))

    async def _play(self, episodes: Episodes, group: Group, request: RolloutRequest, recorded: Recorded) -> None:
        """Play an episode. Its tokens are recorded as they arrive, and once more in full with its outcome."""
        task = asyncio.current_task()
        if group.group_id not in self._open or task is None:  # abandoned before it began
            episodes.conclude(request.rollout_id)
            return
        self._episode_tasks[request.rollout_id] = task
        try:
            try:
                rollout, score = await episodes.play(
                    request.rollout_id, group.prompt, request.sampling, group.group_id, recorded, self._record_segments
                )
            finally:
                del self._episode_tasks[request.rollout_id]
            if group.group_id in self._open:
                finished = [rollout] if rollout is not None and isinstance(score, Scored) else []
                await self._conclude(finished, [Outcome(request.rollout_id, score)])
        finally:
            episodes.conclude(request.rollout_id)

    def _record_segments(self, segments: list[Segment]) -> None:
        self.spawn(self.buffer.record(segments=segments))

    def _on_end(self, batch: EndedRequests) -> None:
        for _, result in batch:
            if isinstance(result, Rollout):
                self._generated.put_nowait(result)
        if failed := [result for _, result in batch if isinstance(result, RolloutFailure)]:
            self.spawn(
                self._conclude([], [Outcome(failure.rollout_id, RewardFailure(failure.reason)) for failure in failed])
            )

    async def _settle(self) -> None:
        """Score rollouts in batches. Rollouts that finish during a call, or during the client's pause, are scored in
        the next call: a single rollout does not wait, and slow calls are few (decision 0006)."""
        while True:
            generated = [await self._generated.get()]
            while not self._generated.empty():
                generated.append(self._generated.get_nowait())
            rollouts = [rollout for rollout in generated if group_and_index(rollout.rollout_id)[0] in self._open]
            if rollouts:
                judged: list[Rollout] = []
                responses: list[Response] = []
                for rollout in rollouts:
                    if ready := self._ready(rollout):
                        prompt = self._open[group_and_index(rollout.rollout_id)[0]].prompt
                        judged += ready
                        responses += responses_of(prompt, ready, self.scoring.sees_group(prompt))
                scoring = asyncio.ensure_future(self.scoring.score(responses))
                recorded = {rollout.rollout_id: rollout for rollout in [*rollouts, *judged]}
                self.spawn(self._record(list(recorded.values()), judged, scoring))
                await asyncio.sleep(self.client.pause_s)
                await asyncio.wait([scoring], timeout=SETTLE_S)

    def _ready(self, rollout: Rollout) -> list[Rollout]:
        """The rollouts to score now. A reward that sees the whole group waits for the group's last rollout."""
        group_id, index = group_and_index(rollout.rollout_id)
        group = self._open[group_id]
        if not self.scoring.sees_group(group.prompt):
            return [rollout]
        waiting = {**group.unscored, index: rollout}
        self._open[group_id] = replace(group, unscored=waiting)
        complete = len(waiting) + len(group.scored) == self.spec.rollout.group_size
        return [waiting[position] for position in sorted(waiting)] if complete else []

    async def _record(
        self, rollouts: list[Rollout], judged: list[Rollout], scoring: asyncio.Future[list[Scored | RewardFailure]]
    ) -> None:
        """Record rollouts, and the scores of the ``judged`` ones. Tokens and scores go into one commit where possible:
        a group ends with its last reward, and the buffer ignores tokens that arrive later."""
        unrecorded = rollouts
        if scoring not in (await asyncio.wait([scoring], timeout=SCORE_TIMEOUT_S))[0]:
            # The reward is slow, and a kill during the wait must not lose these tokens (decision 0013).
            await self.buffer.record(rollouts)
            unrecorded = []
        scores = zip(judged, await scoring, strict=True)
        await self._conclude(unrecorded, [Outcome(rollout.rollout_id, score) for rollout, score in scores])

    async def _conclude(self, rollouts: list[Rollout], outcomes: list[Outcome]) -> None:
        """Record the outcomes of rollouts, and handle the groups that end with them."""
        # Record before acting: the buffer decides which groups have ended, and a kill must not undo it (decision 0013).
        settled = await self.buffer.record(rollouts, outcomes=outcomes)
        failures = {
            group_and_index(outcome.rollout_id)[0]: outcome.score
            for outcome in outcomes
            if isinstance(outcome.score, RewardFailure)
        }
        for group_id in settled.finished:
            self._visited(group_id, settled)
            self.failures.count_group()
            self.rejected_in_a_row.clear()
        for group_id, reason in settled.rejected:
            self._visited(group_id, settled)
            failure = failures.get(group_id, UNSCORED_FAILURE)
            if not failure.counts:
                continue
            self.rejected_in_a_row[reason] += 1
            if reason == "uniform":
                self.failures.count_group()
                in_a_row = self.rejected_in_a_row.total()
                if in_a_row >= MIN_FAILURES and _is_power_of_2(in_a_row):
                    self.warn(f"the last {in_a_row} groups are rejected: {self._reasons()}")
                continue
            self.failures.count_group(failure)
            self._lost += 1
            if _is_power_of_2(self._lost):
                count = f" ({self._lost} groups so far)" if self._lost > 1 else ""
                self.warn(f"group {group_id} is rejected: {failure}{count}")
            await self._cancel(group_id)
        self._check()
        self.client.room.set()

    def _visited(self, group_id: int, settled: Settled) -> None:
        group, rejection = self._open.pop(group_id, None), dict(settled.rejected).get(group_id)
        if group is not None and rejection not in ("failed", "unscored"):
            self.prompts.visited(group.prompt.uid, group_id in settled.solved)

    async def _cancel(self, group_id: int) -> None:
        ids = [training_rollout_id(group_id, index) for index in range(self.spec.rollout.group_size)]
        for rollout_id in ids:
            if (task := self._episode_tasks.get(rollout_id)) is not None:
                task.cancel()
        await self.client.cancel(ids)

    def _check(self) -> None:
        failure = next(iter(self.failures.recent), UNSCORED_FAILURE)
        location = failure.location or "rollout"
        logs = f"{'' if failure.location else 'engine-*.log, '}scorer.log and episode-worker-*.log"
        remedy = f"fix the cause (see {logs} in the run's logs)"
        if failure == UNSCORED_FAILURE:
            remedy = "let the reward return a number for more responses"
        if message := self.failures.too_many():
            raise RunError(message, location=location, hint=f"{remedy}, or raise rollout.max_failed_share")
        rejected_count = self.rejected_in_a_row.total()
        if rejected_count < self.spec.pipeline.max_rejected_in_a_row:
            return
        if self.rejected_in_a_row["uniform"] * 2 >= rejected_count:
            location = "algorithm.uniform_groups"
            remedy = "use a task that the model sometimes solves, set algorithm.uniform_groups to skip"
        raise RunError(
            f"the last {rejected_count} groups were all rejected, so no batch can be made: {self._reasons()}",
            location=location,
            hint=f"{remedy}, or raise pipeline.max_rejected_in_a_row",
        )

    def _reasons(self) -> str:
        reasons = self.rejected_in_a_row.most_common()
        return ", ".join(f"{REJECTION_TEXTS[key]}{f' ({count})' if len(reasons) > 1 else ''}" for key, count in reasons)


def _is_power_of_2(count: int) -> bool:
    """True at 1, 2, 4, 8, ...: repeated warnings must not flood the log."""
    return count & (count - 1) == 0
