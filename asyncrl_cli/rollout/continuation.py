"""Continues a rollout, in token space, where an engine stopped.

A sequence is the concatenation of its segments (``TokenSequence.join`` checks this). Splitting it anywhere and joining
the parts gives the same arrays. Text is used only to find a stop string that two engines generated together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl_cli.records.experts import Experts, filled, join_experts
from asyncrl_cli.records.generation import FinishReason, Rollout, RolloutRequest, Segment, TokenSequence
from asyncrl_cli.rollout.response_text import cut


class Aborted(Exception):
    """A request was aborted on command. This is not a failure: the caller continues from its tokens.

    ``segments``: the tokens generated after its prefix.
    """

    def __init__(self, segments: list[Segment]) -> None:
        super().__init__("the request was aborted")
        self.segments = segments


def split_by_version(
    rollout_id: str,
    start: int,
    ids: Sequence[int] | NDArray[Any],
    logprobs: Sequence[float] | NDArray[Any],
    version_starts: Sequence[tuple[int, int]],
    experts: Experts | None = None,
) -> list[Segment]:
    """Split tokens ``start``, ``start + 1``, ... of a sequence into segments of one weight version (or ``CONTEXT``).

    ``version_starts``: (version, index of its first token) by ascending index; it may cover more than these tokens.
    ``experts``: a row per token. Raises ``RuntimeError`` for a token without a log-prob or a version.
    """
    end = start + len(ids)
    if len(logprobs) != len(ids):
        raise RuntimeError(f"{len(ids)} tokens of rollout {rollout_id} have {len(logprobs)} log-probs")
    if end > start and (not version_starts or version_starts[0][1] > start):
        raise RuntimeError(f"no weight version is known for token {start} of rollout {rollout_id}")
    bounds = np.clip([*(version_start for _, version_start in version_starts), end], start, end)
    versions = np.repeat(np.asarray([version for version, _ in version_starts], np.int32), np.diff(bounds))
    tokens = TokenSequence(
        np.asarray(ids, np.int32), logprobs=np.asarray(logprobs, np.float32), versions=versions, experts=experts
    )
    return tokens.segments(rollout_id, start)


def stopped_at(decode: Callable[[Any], str], ids: Sequence[int] | NDArray[Any], stop: Sequence[str]) -> int | None:
    """Return the number of tokens after which the text contains a stop string; None if it contains none.

    Engines do not do this: an engine that continues a rollout searches only its own part of the text.
    """

    def stopped(count: int) -> bool:
        text = decode(ids[:count])
        return any(stop_string in text for stop_string in stop)

    if not stop or not stopped(len(ids)):
        return None
    return bisect_left(range(len(ids)), True, key=stopped)


def finished(
    request: RolloutRequest,
    segments: Iterable[Segment],
    reason: FinishReason,
    decode: Callable[[Any], str],
    earlier_experts: Experts | None = None,
) -> Rollout:
    """Join a request's prefix and its new ``segments``, which may be empty, into its rollout.

    ``reason`` says how the segments ended; a stop string that began in the prefix ends the rollout, too. Text is
    decoded once, from all ids. ``earlier_experts``: experts that the engine of ``segments`` chose for prompt and
    prefix. The prefix keeps its own experts where they are known. Raises ``ValueError`` when prefix and segments do not
    form one sequence.
    """
    tokens = TokenSequence.join([*request.prefix, *segments])
    prompt_experts = None
    if earlier_experts is not None:
        prompt_experts, of_prefix = np.split(earlier_experts, [len(request.prompt_ids)])
        later = len(tokens.ids) - len(of_prefix)
        experts = filled(tokens.experts, join_experts([(len(of_prefix), of_prefix), (later, None)]))
        tokens = replace(tokens, experts=experts)
    if (end := stopped_at(decode, tokens.ids, request.sampling.stop)) is not None:
        tokens, reason = tokens.slice(0, end), "stop"
    return Rollout(
        *tokens.arrays,
        rollout_id=request.rollout_id,
        prompt_ids=request.prompt_ids,
        text=cut(decode(tokens.ids), request.sampling.stop),
        finish_reason=reason,
        prompt_experts=prompt_experts,
    )
