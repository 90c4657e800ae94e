"""Reads running requests from stand-ins for vLLM's request states (test_segments.py uses vLLM's own)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from asyncrl_cli.records.generation import TokenSequence
from asyncrl_cli.rollout.vllm_inflight import request_id, running_segments, running_tokens


def state(name: str, tokens: int, versions: list[tuple[str, int]], logprobs: bool = True) -> Any:
    flat = SimpleNamespace(logprobs=[-0.5 * token for token in range(tokens)])
    return SimpleNamespace(
        external_req_id=name,
        detokenizer=SimpleNamespace(output_token_ids=list(range(100, 100 + tokens))),
        logprobs_processor=SimpleNamespace(logprobs=flat if logprobs else None),
        weight_version_starts=versions,
        routed_experts_chunks=[],
    )


def vllm(*states: Any) -> Any:
    by_id = {f"{state.external_req_id}-{index:08x}": state for index, state in enumerate(states)}
    return SimpleNamespace(output_processor=SimpleNamespace(request_states=by_id))


def bounds(segments: list[Any]) -> list[tuple[str, int, int, int]]:
    return [(segment.rollout_id, segment.start, segment.end, segment.version) for segment in segments]


def test_new_tokens_are_split_where_the_version_changes() -> None:
    running = vllm(state(request_id("3-1", 0), 6, [("4", 0), ("5", 2), ("6", 5)]))
    assert bounds(running_segments(running, {"3-1": 0})) == [("3-1", 0, 2, 4), ("3-1", 2, 5, 5), ("3-1", 5, 6, 6)]
    assert bounds(running_segments(running, {"3-1": 3})) == [("3-1", 3, 5, 5), ("3-1", 5, 6, 6)]
    assert running_segments(running, {"3-1": 6}) == []
    assert TokenSequence.join(running_segments(running, {"3-1": 0})).ids.tolist() == [100, 101, 102, 103, 104, 105]
    assert running_segments(running, {"3-1": 3})[0].logprobs.tolist() == [-1.5, -2.0]


def test_a_request_with_a_prefix_begins_after_it() -> None:
    running = vllm(state(request_id("3-1", 10), 4, [("4", 0), ("5", 3)]))
    assert bounds(running_segments(running, {"3-1": 10})) == [("3-1", 10, 13, 4), ("3-1", 13, 14, 5)]
    assert bounds(running_segments(running, {"3-1": 12})) == [("3-1", 12, 13, 4), ("3-1", 13, 14, 5)]


def test_only_requested_rollouts_are_reported_and_every_token_counts() -> None:
    running = vllm(
        state("probe-1", 1, [("4", 0)], logprobs=False),
        state(request_id("eval:2:greedy:0", 0), 5, [("4", 0)]),
        state(request_id("3-1", 0), 0, []),
        state(request_id("3-2", 0), 2, [("4", 0)]),
    )
    assert bounds(running_segments(running, {"3-1": 0, "3-2": 0, "9-9": 0})) == [("3-2", 0, 2, 4)]
    assert running_tokens(running) == 8
