"""Reads the tokens that vLLM has sampled so far for running requests.

The only module that reads vLLM's private state (decision 0010). All of it runs between two awaits of the event loop
that vLLM's own output handler runs in, so tokens, log-probs and versions are of one moment.

A request's id says which rollout it generates and from which token on: 0, or the one after the prefix that another
engine left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl_cli.records.experts import Experts
from asyncrl_cli.records.generation import Segment
from asyncrl_cli.rollout.continuation import split_by_version


def request_id(rollout_id: str, first: int) -> str:
    """The id under which vLLM generates a rollout from token ``first`` on."""
    return f"{rollout_id}+{first}"


def sampled_logprobs(flat: Any) -> list[float]:
    """The list in vLLM's ``FlatLogprobs``: with ``logprobs=0`` it has one entry per token, the sampled one's."""
    return [] if flat is None else flat.logprobs


def newest_experts(parts: Sequence[Any], tokens: int) -> Experts | None:
    """The last ``tokens`` rows of vLLM's experts, which come in ``parts`` [rows, layers, k]; None without parts.

    They belong to the newest tokens: vLLM gives a row for every token but the last, from the prompt's first on.
    Raises ``RuntimeError`` when there are fewer.
    """
    if not parts:
        return None
    taken: list[Any] = []
    missing = tokens
    for part in reversed(parts):  # the prompt's rows, which are many, come first
        if missing <= 0:
            break
        taken.insert(0, part)
        missing -= len(part)
    if missing > 0:
        raise RuntimeError(f"vLLM has given the experts of {tokens - missing} of {tokens} tokens")
    rows: Experts = np.concatenate([parts[0][:0], *taken])[-missing:]
    return rows.reshape(tokens, math.prod(rows.shape[1:]))


def running_segments(vllm: Any, since: Mapping[str, int]) -> list[Segment]:
    """The tokens of running rollouts from the index that ``since`` has for them; nothing of other requests."""
    segments: list[Segment] = []
    # Private (decision 0010): vLLM's public outputs have the weight versions at a request's end only, and those before
    # would cost a queue and a wake-up per token and request.
    for state in vllm.output_processor.request_states.values():
        rollout_id, _, first = state.external_req_id.rpartition("+")
        if rollout_id not in since:
            continue
        offset = int(first)
        begin = max(since[rollout_id] - offset, 0)
        # The list itself where the tokenizer is a fast one or the request is not detokenized, else a copy.
        token_ids = state.detokenizer.output_token_ids
        if begin < len(token_ids):
            segments += split_by_version(
                rollout_id,
                start=offset + begin,
                ids=token_ids[begin:],
                logprobs=sampled_logprobs(state.logprobs_processor.logprobs)[begin:],
                version_starts=[(int(version), offset + start) for version, start in state.weight_version_starts],
                experts=newest_experts(state.routed_experts_chunks, len(token_ids) - begin),
            )
    return segments


def running_tokens(vllm: Any) -> int:
    """Tokens generated so far for all requests that run."""
    return sum(len(state.detokenizer.output_token_ids) for state in vllm.output_processor.request_states.values())
