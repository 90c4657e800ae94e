"""The engines' inputs and outputs: requests and rollouts, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl_cli.records.experts import Experts, join_experts
from asyncrl_cli.records.images import PlacedImage

FinishReason = Literal["stop", "length"]

CONTEXT = -1
"""The "weight version" of tokens that the policy did not sample: text from a user, a tool or an environment, and the
chat template's tokens. Their log-prob is 0, and they are never trained on."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one rollout."""

    temperature: float  # 0: greedy
    max_tokens: int
    seed: int | None = None
    stop: tuple[str, ...] = ()


# ``Segment`` and ``Rollout`` pickle their arrays as plain bytes: hundreds of short ones pass between processes, and
# numpy's own pickling takes ten times as long (decision 0006).


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Tokens ``start``, ``start + 1``, ... of a sequence, all with the same weight version (or ``CONTEXT``)."""

    rollout_id: str
    start: int
    version: int
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]  # nats
    experts: Experts | None = None

    @property
    def end(self) -> int:
        """The index after the last token."""
        return self.start + len(self.ids)

    def slice(self, start: int, end: int | None = None) -> Segment | None:
        """The tokens from index ``start`` of the sequence to before ``end``; None if the segment has none of them."""
        start, end = max(start, self.start), self.end if end is None else min(end, self.end)
        if start >= end:
            return None
        span = slice(start - self.start, end - self.start)
        return replace(
            self,
            start=start,
            ids=self.ids[span],
            logprobs=self.logprobs[span],
            experts=None if self.experts is None else self.experts[span],
        )

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = self.ids.tobytes(), self.logprobs.tobytes(), self.experts
        return _unpack_segment, (self.rollout_id, self.start, self.version, *arrays)


def _unpack_segment(
    rollout_id: str, start: int, version: int, ids: bytes, logprobs: bytes, experts: Experts | None
) -> Segment:
    arrays = np.frombuffer(ids, np.int32), np.frombuffer(logprobs, np.float32), experts
    return Segment(rollout_id, start, version, *arrays)


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """Tokens with the weight version that sampled each token. Every array has one entry or row per token."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]  # nats, under the sampling distribution, temperature included
    versions: NDArray[np.int32]  # never decrease, except for ``CONTEXT``
    experts: Experts | None = None  # None: not recorded

    def __post_init__(self) -> None:
        lengths = [len(array) for array in self.arrays if array is not None]
        if len(set(lengths)) > 1:
            raise ValueError(f"ids, log-probs, versions (and experts) have different lengths: {lengths}")

    @classmethod
    def context(cls, ids: Sequence[int] | NDArray[np.int32] = (), experts: Experts | None = None) -> TokenSequence:
        """A sequence of tokens that the policy did not sample."""
        count = len(ids)
        return cls(np.asarray(ids, np.int32), np.zeros(count, np.float32), np.full(count, CONTEXT, np.int32), experts)

    @classmethod
    def join(cls, segments: Iterable[Segment]) -> TokenSequence:
        """Join segments. Raises ``ValueError`` unless they form a sequence from token 0 on, without gaps or overlaps,
        with versions that never decrease."""
        segments = list(segments)
        end, version = 0, CONTEXT  # below every version
        for segment in segments:
            name = f"rollout {segment.rollout_id}"
            if segment.start != end:
                raise ValueError(f"{name} has a segment from token {segment.start} after {end} tokens")
            if CONTEXT != segment.version < version:
                raise ValueError(f"{name} goes back from weight version {version} to {segment.version}")
            end, version = segment.end, max(segment.version, version)
        counts = [len(segment.ids) for segment in segments]
        return cls(
            np.concatenate([np.empty(0, np.int32), *(segment.ids for segment in segments)]),
            np.concatenate([np.empty(0, np.float32), *(segment.logprobs for segment in segments)]),
            np.repeat(np.asarray([segment.version for segment in segments], np.int32), counts),
            join_experts(zip(counts, (segment.experts for segment in segments), strict=True)),
        )

    @property
    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32], Experts | None]:
        """Ids, log-probs, versions and experts."""
        return self.ids, self.logprobs, self.versions, self.experts

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """A mask of the tokens that the policy sampled (not ``CONTEXT``)."""
        return np.not_equal(self.versions, CONTEXT)

    def slice(self, start: int, end: int | None) -> TokenSequence:
        """The tokens from ``start`` to before ``end``; None: to the last."""
        experts = None if self.experts is None else self.experts[start:end]
        return TokenSequence(
            self.ids[start:end], logprobs=self.logprobs[start:end], versions=self.versions[start:end], experts=experts
        )

    def extended(self, continuation: TokenSequence) -> TokenSequence:
        """The concatenation of these tokens and ``continuation``."""
        return TokenSequence(
            np.concatenate([self.ids, continuation.ids]),
            logprobs=np.concatenate([self.logprobs, continuation.logprobs]),
            versions=np.concatenate([self.versions, continuation.versions]),
            experts=join_experts((len(sequence.ids), sequence.experts) for sequence in (self, continuation)),
        )

    def segments(self, rollout_id: str, start: int = 0) -> list[Segment]:
        """The tokens, split where the version changes. Their first token is token ``start`` of the whole sequence."""
        bounds = [0, *(np.flatnonzero(np.diff(self.versions)) + 1).tolist(), len(self.versions)]
        runs = [(low, self.slice(low, high)) for low, high in pairwise(bounds) if high > low]
        return [
            Segment(rollout_id, start + low, int(run.versions[0]), run.ids, run.logprobs, run.experts)
            for low, run in runs
        ]


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One rollout to generate. Waiting requests run by ``priority``, lowest first, among equals the oldest first.

    ``rollout_id`` is permanent. The seed follows from it, so under the same weights the same id gives the same tokens.
    """

    rollout_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling  # its max_tokens include the prefix
    prefix: tuple[Segment, ...] = ()  # tokens generated before, from token 0 on; the engine continues after them
    min_version: int = 0
    """The newest version that sampled a token of the conversation's earlier turns. No older version may continue it."""
    priority: int = 0
    affinity: str = ""
    """Requests with the same affinity share an engine's prefix cache: they go to it while it serves and has room."""
    streamed: bool = False  # new tokens are delivered every ``worker.STREAM_S`` seconds
    awaited: bool = False  # its end is delivered immediately
    images: tuple[PlacedImage, ...] = ()
    """The images in ``prompt_ids``, in their order."""

    @property
    def generated(self) -> int:
        """Tokens of the prefix."""
        return self.prefix[-1].end if self.prefix else 0

    @property
    def remaining_tokens(self) -> int:
        """Tokens that may still be generated."""
        return max(self.sampling.max_tokens - self.generated, 0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rollout(TokenSequence):
    """One finished trajectory: the tokens of its response.

    An episode (an environment or agent that calls the model several times) has no ``prompt_ids``: its response begins
    with the first call's prompt, as ``CONTEXT``. A call that does not continue an earlier conversation begins another
    sequence of the same rollout, one of its ``branches``.
    """

    rollout_id: str
    prompt_ids: tuple[int, ...]
    text: str  # decoded without the end token
    finish_reason: FinishReason
    branches: tuple[Rollout, ...] = ()  # they have no branches themselves
    prompt_experts: Experts | None = None  # the experts of ``prompt_ids``
    images: tuple[PlacedImage, ...] = ()
    """The images in prompt and response, in their order."""

    @property
    def sequences(self) -> tuple[Rollout, ...]:
        """The rollout itself, then its branches."""
        return (self, *self.branches)

    @property
    def sampled_versions(self) -> NDArray[np.int32]:
        """The versions of all sampled tokens, sequence by sequence."""
        if not self.branches and self.sampled.all():
            return self.versions
        return np.concatenate([sequence.versions[sequence.sampled] for sequence in self.sequences])

    @property
    def finished(self) -> bool:
        """True if the model ended the response itself; in an episode its last reply, in whichever branch."""
        return self.finish_reason == "stop"

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = self.ids.tobytes(), self.logprobs.tobytes(), self.versions.tobytes(), self.experts
        values = [getattr(self, name) for name in ROLLOUT_FIELDS]
        return _unpack_rollout, (*arrays, *values)


ROLLOUT_FIELDS = tuple(member.name for member in fields(Rollout) if member.name not in TokenSequence.__slots__)


def _unpack_rollout(ids: bytes, logprobs: bytes, versions: bytes, experts: Experts | None, *values: Any) -> Rollout:
    return Rollout(
        np.frombuffer(ids, np.int32),
        logprobs=np.frombuffer(logprobs, np.float32),
        versions=np.frombuffer(versions, np.int32),
        experts=experts,
        **dict(zip(ROLLOUT_FIELDS, values, strict=True)),
    )


EVALUATION = "eval:"
"""Prefix of the ids of evaluation rollouts, which start over when an engine dies."""


def training_rollout_id(group_id: int, index: int) -> str:
    """The id of the rollout at ``index`` (0, 1, ...) of a training group."""
    return f"{group_id}-{index}"


def branch_id(rollout_id: str, branch: int) -> str:
    """The id of a rollout's sequence: ``branch`` 0 is the rollout itself, branches count from 1."""
    return f"{rollout_id}.{branch}" if branch else rollout_id


def group_and_index(sequence_id: str) -> tuple[int, int]:
    """A training rollout's group and its index in the group, from the id of any of its sequences."""
    return sequence_of(sequence_id)[:2]


def sequence_of(sequence_id: str) -> tuple[int, int, int]:
    """Group, index and branch of a training rollout's sequence."""
    rollout_id, _, branch = sequence_id.partition(".")
    group_id, index = rollout_id.split("-")
    return int(group_id), int(index), int(branch or 0)


@dataclass(frozen=True, slots=True)
class RolloutFailure:
    """A rollout that an engine could not generate, and why."""

    rollout_id: str
    reason: str


class RequestEnding(StrEnum):
    """How an engine's work on a request ended."""

    STOP = "stop"
    LENGTH = "length"
    FAILED = "failed"
    ABORTED = "aborted"
    LOST = "lost"  # the engine itself was lost
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request's stay on an engine, from sending to leaving (unix times, s).

    An engine has a few more requests than it runs, so a request may first wait for a slot: it was in vLLM from
    ``running_from`` to ``running_until``. Unknown values are None, for example if the engine was lost.
    """

    request_id: str  # the rollout's id; for a call of an episode ROLLOUT/CALL
    engine: str
    begun_at: float
    ended_at: float
    ending: RequestEnding
    tokens: int = 0  # sampled by this request; after a cancellation or loss, as many as the driver received
    context_tokens: int = 0  # tokens before them: the prompt, and tokens sampled by other engines
    cached_tokens: int | None = None  # context tokens in vLLM's prefix cache, which were not computed again
    running_from: float | None = None
    running_until: float | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """A returned request's stay in vLLM, in seconds before the delivery."""

    rollout_id: str
    since_s: float
    until_s: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class EngineActivity:
    """An engine's work since the last report. Activities add up."""

    generated_tokens: int = 0
    busy_s: float = 0.0
    paused_s: float = 0.0
    wall_s: float = 0.0
    silent_s: float = 0.0  # seconds since the last token while there are rollouts to generate; not a sum
    sequence_s: float = 0.0  # the number of requests in vLLM, integrated over time

    def __add__(self, activity: EngineActivity) -> EngineActivity:
        names = {member.name for member in fields(self)} - {"silent_s"}
        return replace(self, **{name: getattr(self, name) + getattr(activity, name) for name in names})


@dataclass(frozen=True, slots=True)
class Delivery:
    """The answer to one call of ``collect``: everything new since the last call."""

    rollouts: list[Rollout] = field(default_factory=list)  # without their prompts
    failures: list[RolloutFailure] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)  # new tokens of unfinished rollouts
    activity: EngineActivity = field(default_factory=EngineActivity)
    aborted: list[str] = field(default_factory=list)  # ids aborted on command; all their tokens are in segments
    placements: list[Placement] = field(default_factory=list)  # all requests that vLLM has returned


@dataclass(frozen=True, slots=True, eq=False)
class Attestation:
    """An engine's proof of the weights that it serves."""

    version: int
    probe_logprobs: NDArray[np.float32]  # [probe tokens - 1], computed on the path that serves rollouts
    stall_s: float  # length of the pause for the update
    resumed_s: float = 0.0  # seconds from the end of the pause to this answer
