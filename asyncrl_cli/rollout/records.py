"""What goes into an engine and what comes out: requests and rollouts, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one rollout is sampled. ``temperature`` 0 is greedy."""

    temperature: float
    max_tokens: int
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One rollout to generate. ``rollout_id`` names it for good: the same id gives the same tokens under the
    same weights, since the seed follows from it."""

    rollout_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One finished trajectory. The three arrays have one entry per generated token.

    ``logprobs`` (float32, nats) are taken from the distribution sampled from, temperature included.
    ``versions`` (int32) never decrease: weights only move forward. ``text`` is decoded once, from all ids,
    without the end token.
    """

    rollout_id: str
    prompt_ids: tuple[int, ...]
    response_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    text: str
    finish_reason: FinishReason

    @property
    def finished(self) -> bool:
        """Whether the model ended the response itself."""
        return self.finish_reason == "stop"


@dataclass(frozen=True, slots=True)
class RolloutFailure:
    """A rollout that an engine could not generate, and why."""

    rollout_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineActivity:
    """What an engine did since the last report. Times in seconds."""

    generated_tokens: int = 0
    busy_s: float = 0.0
    paused_s: float = 0.0
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one call of ``collect`` brings: whatever ended since the call before it."""

    rollouts: list[Rollout] = field(default_factory=list)
    failures: list[RolloutFailure] = field(default_factory=list)
    activity: EngineActivity = field(default_factory=EngineActivity)


@dataclass(frozen=True, slots=True, eq=False)
class Attestation:
    """An engine's answer to "which weights do you serve?".

    ``probe_logprobs`` (float32, [probe tokens - 1]) come from the same path that serves rollouts.
    """

    version: int
    probe_logprobs: NDArray[np.float32]
    stall_s: float
