"""The reported tokens of a sequence are its final tokens, whatever was reported before the end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.gateway.transcript import ReplyEnd, Transcript
from asyncrl_cli.records.generation import Segment, TokenSequence
from asyncrl_cli.records.images import Image, PlacedImage

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


@pytest.mark.parametrize(("data", "replayed"), [(b"red", [5, 6]), (b"blue", [])])
def test_reply_of_an_abandoned_call_is_replayed_only_under_the_same_image(data: bytes, replayed: list[int]) -> None:
    """Placeholders of images of one size are equal."""
    prompt, red = [1, 9, 9, 2], PlacedImage(Image.from_bytes(b"red"), 1, 2)
    transcript = Transcript("0-0", {}, None)
    call = transcript.begin(None, prompt, (red,))
    transcript.grow(call, sampled([5, 6]).segments("0-0"))
    transcript.abandon(call, keep=True)
    image = PlacedImage(Image.from_bytes(data), 1, 2)
    again = transcript.begin(None, prompt, (image,))
    assert (again.replayed.ids.tolist(), again.images) == (replayed, (image,))


def test_reply_of_an_earlier_play_is_not_replayed_under_an_image() -> None:
    """Recorded segments do not have the images that their tokens were sampled under."""
    prompt = [1, 9, 9, 2]
    recorded = TokenSequence.context(prompt).extended(sampled([5, 6])).segments("0-0")
    image = PlacedImage(Image.from_bytes(b"red"), 1, 2)
    assert Transcript("0-0", {0: recorded}, None).begin(None, prompt).replayed.ids.tolist() == [5, 6]
    assert not len(Transcript("0-0", {0: recorded}, None).begin(None, prompt, (image,)).replayed.ids)
