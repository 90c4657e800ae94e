"""Each token keeps the experts of the pass that predicted it, however its sequence is split, joined and continued."""

from __future__ import annotations

import pickle
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.gateway.transcript import ReplyEnd, Transcript
from asyncrl_cli.records.experts import UNKNOWN, Experts, filled, from_bytes, join_experts, to_bytes
from asyncrl_cli.records.generation import CONTEXT, Rollout, RolloutRequest, Sampling, Segment, TokenSequence
from asyncrl_cli.rollout.continuation import finished
from asyncrl_cli.rollout.engine import _experts
from asyncrl_cli.rollout.vllm_inflight import newest_experts, request_id, running_segments

LAYERS, K = 2, 3
DTYPES = st.sampled_from([np.uint8, np.uint16])
CUTS = st.lists(st.integers(0, 40), max_size=6)


def experts(first: int, end: int, dtype: type = np.uint8, engine: int = 1) -> Experts:
    """Rows that contain the index of their token in the sequence; the first token of the prompt has no row."""
    rows = np.stack([np.arange(first, end), np.full(end - first, engine), *[np.arange(end - first)] * 4], axis=1)
    return np.where(np.arange(first, end)[:, None] == 0, UNKNOWN, rows + (np.arange(6) > 1)).astype(dtype)


def sequence(count: int, dtype: type = np.uint8, versions: tuple[int, ...] = (3,)) -> TokenSequence:
    of = np.sort(np.resize(versions, count)).astype(np.int32)
    return TokenSequence(np.arange(count, dtype=np.int32), np.zeros(count, np.float32), of, experts(0, count, dtype))


def belongs(tokens: TokenSequence | Segment) -> bool:
    """Whether each token still has its own row. Ids are the indices in the sequence."""
    assert tokens.experts is not None
    return bool((tokens.experts[:, 0] == tokens.ids).all()) and len(tokens.experts) == len(tokens.ids)


@given(count=st.integers(1, 40), cuts=CUTS, dtype=DTYPES, versions=st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_rows_stay_with_their_tokens(count: int, cuts: list[int], dtype: type, versions: list[int]) -> None:
    full = sequence(count, dtype, tuple(versions))
    bounds = sorted({0, count, *(cut for cut in cuts if cut < count)})
    parts = [part for a, b in pairwise(bounds) for part in full.slice(a, b).segments("1-0", a)]
    parts = [pickle.loads(pickle.dumps(part)) for part in parts]
    assert all(map(belongs, parts))
    joined = TokenSequence.join(parts)
    assert belongs(joined)
    assert joined.experts is not None
    assert joined.experts.dtype == dtype
    assert from_bytes(to_bytes(joined.experts), count).tobytes() == joined.experts.tobytes()
    for cut in cuts:
        (whole,) = sequence(count, dtype).segments("1-0")
        assert (after := whole.slice(cut)) is None or belongs(after)
        assert belongs(full.slice(0, cut).extended(full.slice(cut, None)))


def test_unknown_experts_are_marked_as_unknown() -> None:
    known = sequence(3)
    both = known.extended(TokenSequence.context([7, 8]))
    assert both.experts is not None
    assert known.experts is not None
    assert both.experts[:3].tolist() == known.experts.tolist()
    assert not both.experts[3:].any()
    assert TokenSequence.context([1]).extended(TokenSequence.context([2])).experts is None
    assert join_experts([(2, None), (0, None)]) is None
    with pytest.raises(ValueError, match=r"different lengths: \[2, 2, 2, 3\]"):
        TokenSequence.context([1, 2], known.experts)
    assert filled(None, known.experts) is known.experts
    assert filled(known.experts, None) is known.experts


# -- vLLM's output


def vllm_rows(tokens: int, cuts: list[int]) -> list[Any]:
    """vLLM's arrays for a sequence of so many tokens: a row for each but the last, in parts."""
    rows = experts(1, tokens).reshape(-1, LAYERS, K)
    return np.split(rows, sorted({cut for cut in cuts if 0 < cut < len(rows)}))


@given(prompt=st.integers(1, 10), generated=st.integers(1, 15), cuts=CUTS, since=st.integers(0, 20))
def test_the_newest_tokens_of_a_running_request(prompt: int, generated: int, cuts: list[int], since: int) -> None:
    """The request continues a rollout after 4 tokens; ids are the indices in prompt and response together."""
    prefix = 4
    end = prompt + prefix + generated
    state = SimpleNamespace(
        external_req_id=request_id("3-1", prefix),
        detokenizer=SimpleNamespace(output_token_ids=list(range(prompt + prefix, end))),
        logprobs_processor=SimpleNamespace(logprobs=SimpleNamespace(logprobs=[0.0] * generated)),
        weight_version_starts=[("4", 0)],
        routed_experts_chunks=vllm_rows(end, cuts),
    )
    running = SimpleNamespace(output_processor=SimpleNamespace(request_states={"one": state}))
    segments = running_segments(running, {"3-1": since})
    assert all(map(belongs, segments))
    assert sum(len(segment.ids) for segment in segments) == min(generated, max(prefix + generated - since, 0))


@given(prompt=st.integers(1, 6), prefix=st.integers(0, 6), generated=st.integers(0, 8))
def test_the_rows_of_an_answer_are_those_before_it_and_its_own(prompt: int, prefix: int, generated: int) -> None:
    begun = [Segment("1-0", 0, 3, np.zeros(prefix, np.int32), np.zeros(prefix, np.float32))] if prefix else []
    request = RolloutRequest("1-0", tuple(range(prompt)), Sampling(1.0, 99), prefix=tuple(begun))
    first, end = prompt + prefix, prompt + prefix + generated
    (rows,) = vllm_rows(end, [])
    output: Any = SimpleNamespace(token_ids=list(range(generated)), routed_experts=rows)
    before, own = _experts(request, output)
    assert before is not None
    assert own is not None
    assert before[:, 0].tolist() == list(range(first))
    assert own[:, 0].tolist() == list(range(first, end))
    evaluation = RolloutRequest("eval:1-0", tuple(range(prompt)), Sampling(1.0, 99))
    assert _experts(evaluation, output) == (None, None)


def test_too_few_rows_are_an_error() -> None:
    assert newest_experts([], 3) is None
    with pytest.raises(RuntimeError, match="experts for 3 of 5 tokens"):
        newest_experts(vllm_rows(4, [1]), 5)


# -- continuing


@given(prompt=st.integers(1, 6), prefix=st.integers(0, 8), rest=st.integers(0, 8), recorded=st.integers(0, 2))
def test_a_continued_rollout_has_the_experts_of_each_engine(prompt: int, prefix: int, rest: int, recorded: int) -> None:
    """Engine 1 generated the prefix; engine 2 computed it again and continued. The first engine's choice is not known
    if ``recorded`` is 0, and known for its first two tokens only if it is 1."""
    known = experts(prompt, prompt + prefix, engine=1)
    ids = np.arange(prompt, prompt + prefix + rest, dtype=np.int32)
    parts = []
    for start, end in ((0, min(2, prefix)), (2, prefix)):
        if start < end:
            of = known[start:end] if recorded == 2 or (recorded == 1 and start == 0) else None
            parts.append(Segment("1-0", start, 3, ids[start:end], np.zeros(end - start, np.float32), of))
    new = [
        Segment(
            "1-0",
            prefix,
            4,
            ids[prefix:],
            np.zeros(rest, np.float32),
            experts(prompt + prefix, prompt + prefix + rest, engine=2),
        )
    ]
    request = RolloutRequest("1-0", tuple(range(prompt)), Sampling(1.0, 99), prefix=tuple(parts))
    rollout = finished(request, new if rest else [], "stop", lambda _: "", experts(0, prompt + prefix, engine=2))
    assert belongs(rollout)
    assert rollout.prompt_experts is not None
    assert rollout.experts is not None
    assert rollout.prompt_experts.tolist() == experts(0, prompt, engine=2).tolist()
    by_first = {0: 0, 1: min(2, prefix), 2: prefix}[recorded]
    assert rollout.experts[:, 1].tolist() == [1] * by_first + [2] * (prefix + rest - by_first)
    again = pickle.loads(pickle.dumps(rollout))
    assert again.experts.tobytes() == rollout.experts.tobytes()
    assert again.prompt_experts.tobytes() == rollout.prompt_experts.tobytes()


# -- episodes


def reply(first: int, end: int, engine: int) -> Rollout:
    """An engine's answer to a call with the tokens up to ``first`` as its prompt."""
    count = end - first
    return Rollout(
        *(np.arange(first, end, dtype=np.int32), np.zeros(count, np.float32), np.full(count, 5, np.int32)),
        experts(first, end, engine=engine),
        rollout_id="0-0/1",
        prompt_ids=tuple(range(first)),
        text="",
        finish_reason="stop",
        prompt_experts=experts(0, first, engine=engine),
    )


@given(turns=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.booleans()), min_size=1, max_size=4))
def test_an_episode_has_the_experts_of_its_prompts_and_replies(turns: list[tuple[int, int, bool]]) -> None:
    """Each turn: given tokens, sampled tokens, and whether these were streamed. Ids are indices in the sequence."""
    reported: list[Segment] = []
    transcript = Transcript("0-0", {}, reported.extend)
    branch, end, engines = None, 0, []
    for number, (given_tokens, sampled, streamed) in enumerate(turns, 1):
        first, end = end + given_tokens, end + given_tokens + sampled
        call = transcript.begin(branch, range(first))
        branch, answer = call.branch, reply(first, end, number)
        if streamed:
            assert answer.experts is not None
            transcript.grow(call, [Segment("x", 0, 5, answer.ids, answer.logprobs, answer.experts)])
        transcript.end(call, answer, "stop", ReplyEnd(end, end - 1))
        engines += [number] * (given_tokens + sampled)
    rollout = transcript.rollout(str)
    assert rollout is not None
    assert belongs(rollout)
    assert rollout.experts is not None
    assert rollout.experts[1:, 1].tolist() == engines[1:]
    assert (rollout.versions == CONTEXT).sum() == sum(given_tokens for given_tokens, *_ in turns)
    assert all(belongs(part) for part in reported if part.version != CONTEXT)
