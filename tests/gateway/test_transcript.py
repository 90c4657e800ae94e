"""The reported tokens of a sequence are its final tokens, whatever was reported before the end."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.gateway.transcript import ReplyEnd, Transcript
from asyncrl_cli.records.generation import Segment, TokenSequence

IDS = st.lists(st.integers(1, 3), min_size=1, max_size=6)


def sampled(ids: list[int]) -> TokenSequence:
    return TokenSequence(np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), np.full(len(ids), 7, np.int32))


@given(prompt=IDS, streamed=IDS, sampled_ids=IDS)
def test_reported_tokens_end_as_the_final_replys_tokens(
    prompt: list[int], streamed: list[int], sampled_ids: list[int]
) -> None:
    """A reply that was generated again may have other tokens than those that were reported first."""
    reported: list[Segment] = []
    transcript = Transcript("0-0", {}, reported.extend)
    call = transcript.begin(None, prompt)
    on_the_way = sampled(streamed)
    transcript.grow(call, [Segment("0-0", 0, 7, on_the_way.ids, on_the_way.logprobs)])
    transcript.end(call, sampled(sampled_ids), "stop", ReplyEnd(len(prompt) + len(sampled_ids), sampled_ids[-1]))
    received: list[int] = []
    for segment in reported:
        received[segment.start :] = segment.ids.tolist()
    assert received[: len(prompt) + len(sampled_ids)] == prompt + sampled_ids
    rollout = transcript.rollout(str)
    assert rollout is not None
    assert rollout.ids.tolist() == prompt + sampled_ids
