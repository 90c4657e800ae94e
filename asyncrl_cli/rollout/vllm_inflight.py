"""Reads the tokens that vLLM has sampled so far for running requests.

The only module that reads vLLM's private state (decision 0010). Its functions never await, and run in the event loop of
vLLM's own output handler, so tokens, log-probs and versions belong to one moment.

A request's id names its rollout and the first token to generate: 0, or the token after another engine's prefix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl_cli.records.experts import Experts
from asyncrl_cli.records.generation import Segment
from asyncrl_cli.rollout.continuation import split_by_version


def request_id(rollout_id: str, first_token: int) -> str:
    """The id under which vLLM generates a rollout from token ``first_token`` on."""
    return f"{rollout_id}+{first_token}"


def sampled_logprobs(flat: Any) -> list[float]:
    """Return the list in vLLM's ``FlatLogprobs``. With ``logprobs=0`` it has only the sampled tokens' log-probs."""
    return [] if flat is None else flat.logprobs


def newest_experts(chunks: Sequence[Any], tokens: int) -> Experts | None:
    """Return the last ``tokens`` rows of vLLM's experts, given in ``chunks`` [rows, layers, k]; None without chunks.

    They belong to the newest tokens: vLLM gives a row for every token of prompt and response except the last. Raises
    ``RuntimeError`` when there are fewer rows.
    """
    if not chunks:
        return None
    newest_chunks: list[Any] = []
    missing_rows = tokens
    for chunk in reversed(chunks):  # the prompt's rows, which are many, come first
        if missing_rows <= 0:
            break
        newest_chunks.insert(0, chunk)
        missing_rows -= len(chunk)
    if missing_rows > 0:
        raise RuntimeError(f"vLLM returned experts for {tokens - missing_rows} of {tokens} tokens")
    rows: Experts = np.concatenate([chunks[0][:0], *newest_chunks])[-missing_rows:]
    return rows.reshape(tokens, math.prod(rows.shape[1:]))


def running_segments(vllm: Any, since: Mapping[str, int]) -> list[Segment]:
    """Return the tokens of running rollouts from index ``since[rollout_id]`` on; other requests are skipped."""
    segments: list[Segment] = []
    # Private (decision 0010): vLLM's public outputs have weight versions only at a request's end, and earlier outputs
    # would cost a queue entry and a wake-up per token and request.
    for state in vllm.output_processor.request_states.values():
        rollout_id, _, first_token = state.external_req_id.rpartition("+")
        if rollout_id not in since:
            continue
        offset = int(first_token)
        begin = max(since[rollout_id] - offset, 0)
        # No copy, if the tokenizer is a fast one or the request is not detokenized.
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


def requests_without_tokens(vllm: Any) -> list[str]:
    """The ids of running requests without a generated token."""
    states = vllm.output_processor.request_states.values()
    return [state.external_req_id for state in states if not state.detokenizer.output_token_ids]


def running_tokens(vllm: Any) -> int:
    """Number of tokens generated so far for all running requests."""
    return sum(len(state.detokenizer.output_token_ids) for state in vllm.output_processor.request_states.values())
