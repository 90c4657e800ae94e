"""Joined messages of vLLM's core: the front end gets the same data of every request as without joining (with vLLM's own
types; test_segments.py uses vLLM's own processes)."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.rollout.vllm_core import JoinedOutputs

pytestmark = pytest.mark.slow  # imports vLLM

DEAD = b"ENGINE_CORE_DEAD"

steps = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {
                "of": st.lists(st.sampled_from("abcde"), min_size=1, max_size=5, unique=True),
                "tokens": st.integers(1, 3),
                "ended": st.sets(st.sampled_from("abcde"), max_size=2),
                "version": st.sampled_from(["4", "5"]),
            }
        ),
        st.just("answer"),
        st.just("prompt"),
        st.just("statistics"),
    ),
    max_size=25,
)


def message(**fields: Any) -> Any:
    from vllm.v1.engine import EngineCoreOutputs

    return EngineCoreOutputs(**fields)


def record(request_id: str, tokens: list[int], **fields: Any) -> Any:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    ids = np.array(tokens, dtype=np.int32).reshape(-1, 1)
    logprobs = LogprobsLists(ids, (-ids / 7).astype(np.float32), np.arange(len(tokens), dtype=np.int32))
    return EngineCoreOutput(request_id, tokens, logprobs, **fields)


def entries(drawn: Iterable[Any]) -> Iterator[Any]:
    """The entries that a core puts into its queue; a request that has ended may return with another id, as in vLLM."""
    from vllm.v1.engine import FinishReason, UtilityOutput

    count, ended = 0, defaultdict(int)
    for step in drawn:
        if step == "answer":
            yield 0, message(utility_output=UtilityOutput(call_id=count))
        elif step == "statistics":
            yield 0, message(outputs=[record(f"e{ended['e']}", [count])], scheduler_stats=SimpleNamespace())
        elif step == "prompt":
            first = record(f"d{ended['d']}", [count], new_prompt_logprobs_tensors=SimpleNamespace())
            yield 0, message(outputs=[first], weight_version="4")
        else:
            records = []
            for name in step["of"]:
                tokens = list(range(count, count + step["tokens"]))
                rows = np.arange(2 * len(tokens)).reshape(-1, 1, 2) if name == "c" else None
                reason = FinishReason.STOP if name in step["ended"] else None
                records.append(record(f"{name}{ended[name]}", tokens, finish_reason=reason, routed_experts=rows))
                ended[name] += reason is not None
                count += len(tokens)
            yield 0, message(outputs=records, weight_version=step["version"])
    yield DEAD


def read_all(drawn: Iterable[Any], wrap: Callable[[Callable[..., Any]], Callable[[], Any]]) -> list[Any]:
    source: queue.Queue[Any] = queue.Queue()
    for entry in entries(drawn):
        source.put(entry)
    get = wrap(source.get)
    found = []
    while not found or found[-1] != DEAD:
        found.append(get())
    return found


def seen(found: Iterable[Any]) -> tuple[dict[str, list[Any]], dict[Any, dict[str, int]]]:
    """For each request: its tokens with log-probs, ranks and versions, experts, and its end. For each answer: the
    tokens before it."""
    requests: dict[str, list[Any]] = defaultdict(list)
    tokens: dict[str, int] = defaultdict(int)
    before: dict[Any, dict[str, int]] = {}
    for entry in found:
        if entry == DEAD:
            before[DEAD] = dict(tokens)
            continue
        _, outputs = entry
        if outputs.utility_output is not None:
            before[outputs.utility_output.call_id, len(before)] = dict(tokens)
        for one in outputs.outputs:
            tokens[one.request_id] += len(one.new_token_ids)
            values = zip(one.new_token_ids, *(part.ravel().tolist() for part in one.new_logprobs[:3]), strict=True)
            requests[one.request_id] += [(*value, outputs.weight_version) for value in values]
            if one.routed_experts is not None:
                requests[f"experts of {one.request_id}"] += one.routed_experts.tolist()
            if one.finish_reason is not None:
                requests[one.request_id].append(one.finish_reason)
    return dict(requests), before


@given(steps, st.dictionaries(st.sampled_from("abcde"), st.sampled_from([1e-9, 60.0])))
def test_every_request_gets_the_same(drawn: list[Any], hold_s: dict[str, float]) -> None:
    plain = seen(read_all(drawn, lambda get: get))
    joined = seen(read_all(drawn, lambda get: JoinedOutputs(get, lambda name: hold_s.get(name[0], 0.0)).get))
    assert joined == plain


def test_waiting_tokens_are_sent_at_their_deadline() -> None:
    source: queue.Queue[Any] = queue.Queue()
    source.put((0, message(outputs=[record("a", [1]), record("b", [2])], weight_version="4")))
    _, outputs = JoinedOutputs(source.get, {"a": 60.0, "b": 0.01}.__getitem__).get()
    assert [one.new_token_ids for one in outputs.outputs] == [[1], [2]]
