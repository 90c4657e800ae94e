"""Training groups from admission to finish: prompts become requests, rollouts become scored groups.

The ledger alone decides how many groups may start; this room keeps the engines as full as it allows, and
keeps the rollouts that the ledger only counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from asyncrl_cli.buffer.ledger import GroupEntry, Ledger
from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.pipeline.dispatcher import Dispatcher
from asyncrl_cli.rollout.records import Rollout, RolloutFailure, RolloutRequest, Sampling
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.records import TrainingGroup

Ended = list[tuple[RolloutRequest, Rollout | RolloutFailure]]


def rollout_seed(seed: int, group_id: int, index: int) -> int:
    """The sampling seed of one rollout: a function of what it is, never of when or where it runs."""
    digest = hashlib.blake2b(f"{seed}/{group_id}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(slots=True)
class _OpenGroup:
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    rewards: dict[int, float] = field(default_factory=dict)


class GroupSource:
    """Starts groups while the ledger has room and the engines have slots; keeps the finished ones.

    ``next_prompt`` gives a prompt with its token ids. ``failures`` counts groups lost to a rollout that failed for
    good, and ``first_failure`` says why the first of them did.
    """

    def __init__(
        self,
        spec: ExperimentSpec,
        ledger: Ledger,
        dispatcher: Dispatcher,
        next_prompt: Callable[[], tuple[Prompt, tuple[int, ...]]],
    ) -> None:
        self._spec = spec
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._next_prompt = next_prompt
        self._sampling = Sampling(
            temperature=spec.rollout.sampling.temperature,
            max_tokens=spec.rollout.max_response_tokens,
            stop=tuple(spec.rollout.sampling.stop),
        )
        self._open: dict[int, _OpenGroup] = {}
        self._finished: dict[int, TrainingGroup] = {}
        self._prompts: dict[int, Prompt] = {}
        self.failures = 0  # groups that a failed rollout took with it
        self.first_failure = ""

    def fill(self, on_end: Callable[[Ended], None]) -> None:
        """Admit groups until the ledger or the engines are full. The requests wait in the outboxes."""
        while self._ledger.room() > 0:
            engine = self._dispatcher.least_loaded()
            if len(engine.pending) + self._spec.rollout.group_size > self._spec.rollout.max_running_rollouts:
                return
            prompt, prompt_ids = self._next_prompt()
            self._start(self._ledger.admit(), prompt, prompt_ids, on_end)

    async def requeue_overdue(self, on_end: Callable[[Ended], None]) -> None:
        """Policy ``requeue``: give up the groups that hold back a batch and start their prompts again."""
        overdue = self._ledger.overdue()
        # All at once: a group that finished while we waited for a cancellation would change who is overdue.
        for group_id in overdue:
            group = self._open.pop(group_id)
            self._start(self._ledger.requeue(group_id), group.prompt, group.prompt_ids, on_end)
        size = self._spec.rollout.group_size
        await self._dispatcher.cancel(f"{group_id}-{i}" for group_id in overdue for i in range(size))

    def unscored(self, ended: Ended) -> list[tuple[int, int, Prompt, Rollout]]:
        """Record what ended; returns (group, index, prompt, rollout) of those that still need a reward.

        A rollout that failed for good takes its whole group with it.
        """
        to_score = []
        for request, result in ended:
            group_id, index = (int(part) for part in request.rollout_id.split("-"))
            group = self._open.get(group_id)
            if group is None:
                continue
            if isinstance(result, RolloutFailure):
                self.failures += 1
                self.first_failure = self.first_failure or result.reason
                self._drop(group_id, "failed")
                continue
            group.rollouts[index] = result
            to_score.append((group_id, index, group.prompt, result))
        return to_score

    def scored(self, group_id: int, index: int, reward: float) -> None:
        """One rollout has its reward; the last one of a group finishes it."""
        group = self._open.get(group_id)
        if group is None:
            return
        group.rewards[index] = reward
        if len(group.rewards) < self._spec.rollout.group_size:
            return
        rewards = tuple(group.rewards[i] for i in sorted(group.rewards))
        if self._spec.algorithm.uniform_groups == "reject" and len(set(rewards)) == 1:
            self._drop(group_id, "uniform")
            return
        rollouts = tuple(group.rollouts[i] for i in sorted(group.rollouts))
        del self._open[group_id]
        self._finished[group_id] = TrainingGroup(group_id, group.prompt.uid, rollouts, rewards)
        self._prompts[group_id] = group.prompt
        self._ledger.finish(group_id)

    def take(self, group_ids: tuple[int, ...]) -> tuple[TrainingGroup, ...]:
        """Hand over finished groups for training."""
        for group_id in group_ids:
            del self._prompts[group_id]
        return tuple(self._finished.pop(group_id) for group_id in group_ids)

    def outstanding_prompts(self) -> list[Prompt]:
        """Prompts of the groups that are admitted and not taken, in admission order."""
        prompts = self._prompts | {group_id: group.prompt for group_id, group in self._open.items()}
        return [prompts[group_id] for group_id in sorted(prompts)]

    def _start(
        self, entry: GroupEntry, prompt: Prompt, prompt_ids: tuple[int, ...], on_end: Callable[[Ended], None]
    ) -> None:
        self._open[entry.group_id] = _OpenGroup(prompt, prompt_ids)
        requests = [
            RolloutRequest(
                rollout_id=f"{entry.group_id}-{index}",
                prompt_ids=prompt_ids,
                sampling=replace(self._sampling, seed=rollout_seed(self._spec.seed, entry.group_id, index)),
            )
            for index in range(self._spec.rollout.group_size)
        ]
        self._dispatcher.enqueue(self._dispatcher.least_loaded(), requests, on_end)

    def _drop(self, group_id: int, reason: str) -> None:
        del self._open[group_id]
        self._ledger.reject(group_id, reason)
