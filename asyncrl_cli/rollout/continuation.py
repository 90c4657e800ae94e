"""Going on with a rollout where an engine left it, in token space.

Invariant: a sequence is its segments one after another, from token 0 on, without gaps or overlaps. From one sampled
segment to the next the weight version never falls; ``GIVEN`` segments may stand anywhere between them. ``cut`` makes
segments, ``join`` puts them together and is the one place that checks this; cutting anywhere and joining gives the same
arrays back. Text never takes part, except to find a stop string of which two engines generated the halves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl_cli.core.seeds import derive_seed
from asyncrl_cli.records.generation import GIVEN, FinishReason, Rollout, RolloutRequest, Sampling, Segment


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of a sequence, with one entry per token in each array (as in ``Rollout``)."""

    response_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]

    def first(self, count: int) -> Tokens:
        """The first ``count`` tokens."""
        return Tokens(self.response_ids[:count], self.logprobs[:count], self.versions[:count])


def rest_of(sampling: Sampling, generated: int) -> Sampling:
    """How the rest of a rollout is sampled of which ``generated`` tokens are there; 0 changes nothing.

    ``max_tokens`` is what is left, 0 when nothing is. The rest has a seed of its own: with the old one the
    random stream would start over and deal the first tokens' numbers a second time.
    """
    if generated == 0:
        return sampling
    seed = sampling.seed
    if seed is not None:
        seed = derive_seed(seed, generated)
    return replace(sampling, max_tokens=max(sampling.max_tokens - generated, 0), seed=seed)


def cut(
    rollout_id: str,
    start: int,
    response_ids: Sequence[int] | NDArray[Any],
    logprobs: Sequence[float] | NDArray[Any],
    version_starts: Sequence[tuple[int, int]],
) -> list[Segment]:
    """Tokens ``start``, ``start + 1``, ... of a sequence, one segment for each run of one weight version or ``GIVEN``.

    ``version_starts`` has (version, index of its first token) by ascending index, of the whole sequence or of more of
    it than these tokens. Raises ``RuntimeError`` for a token without a log-prob or a version.
    """
    end = start + len(response_ids)
    if len(logprobs) != len(response_ids):
        raise RuntimeError(f"{len(response_ids)} tokens of rollout {rollout_id} have {len(logprobs)} log-probs")
    if end > start and (not version_starts or version_starts[0][1] > start):
        raise RuntimeError(f"nobody said which weights sampled token {start} of rollout {rollout_id}")
    ids = np.asarray(response_ids, dtype=np.int32)
    values = np.asarray(logprobs, dtype=np.float32)
    bounds = [*(min(max(first, start), end) for _, first in version_starts), end]
    return [
        Segment(rollout_id, first, version, ids[first - start : last - start], values[first - start : last - start])
        for (version, _), (first, last) in zip(version_starts, pairwise(bounds), strict=True)
        if last > first
    ]


def join(segments: Iterable[Segment]) -> Tokens:
    """Segments put together; raises ``ValueError`` when they are not one sequence from token 0 on."""
    segments = list(segments)
    end, version = 0, GIVEN  # which is below every version
    for segment in segments:
        if segment.start != end:
            raise ValueError(
                f"rollout {segment.rollout_id} has a segment from token {segment.start} after {end} tokens"
            )
        if GIVEN != segment.version < version:
            raise ValueError(f"rollout {segment.rollout_id} falls from weight version {version} to {segment.version}")
        end, version = segment.end, max(segment.version, version)
    return Tokens(
        np.concatenate([np.empty(0, np.int32), *(segment.response_ids for segment in segments)]),
        np.concatenate([np.empty(0, np.float32), *(segment.logprobs for segment in segments)]),
        np.repeat(
            np.asarray([segment.version for segment in segments], np.int32),
            [len(segment.response_ids) for segment in segments],
        ),
    )


def stopped_at(
    decode: Callable[[Any], str], response_ids: Sequence[int] | NDArray[Any], stop: Sequence[str]
) -> int | None:
    """How many tokens it takes until the text has one of the stop strings in it; None when it has none.

    An engine that goes on with a rollout looks for stop strings in its own part of the text alone.
    """

    def stopped(count: int) -> bool:
        text = decode(response_ids[:count])
        return any(one in text for one in stop)

    if not stop or not stopped(len(response_ids)):
        return None
    return bisect_left(range(len(response_ids)), True, key=stopped)


def finished(
    request: RolloutRequest, rest: Iterable[Segment], reason: FinishReason, decode: Callable[[Any], str]
) -> Rollout:
    """The rollout of a request, of which ``rest`` was generated after its prefix, or nothing.

    ``reason`` says how the rest ended. A stop string that began in the prefix ends the rollout, too; text is decoded
    once, from all ids. Raises ``ValueError`` when prefix and rest are not one sequence.
    """
    tokens = join([*request.prefix, *rest])
    if request.prefix and (end := stopped_at(decode, tokens.response_ids, request.sampling.stop)) is not None:
        tokens, reason = tokens.first(end), "stop"
    return Rollout(
        rollout_id=request.rollout_id,
        prompt_ids=request.prompt_ids,
        response_ids=tokens.response_ids,
        logprobs=tokens.logprobs,
        versions=tokens.versions,
        text=decode(tokens.response_ids),
        finish_reason=reason,
    )
