"""Dividing and continuing rollouts, with random rollouts and boundaries."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.records.generation import CONTEXT, RolloutRequest, Sampling, Segment, TokenSequence
from asyncrl_cli.rollout.continuation import finished, split_by_version, stopped_at

pytestmark = pytest.mark.slow

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=30)


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[list[int], list[float], list[tuple[int, int]]]:
    """Token ids, log-probs, and where versions start; half of the rollouts have given tokens among the sampled ones."""
    ids = draw(IDS)
    logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=len(ids), max_size=len(ids)))
    starts = sorted(draw(st.sets(st.integers(1, max(len(ids) - 1, 1)), max_size=6)))
    versions = sorted(draw(st.sets(st.integers(0, 99), min_size=len(starts) + 1, max_size=len(starts) + 1)))
    for at in range(draw(st.integers(0, 1)), len(versions), 2) if draw(st.booleans()) else ():
        versions[at] = CONTEXT
    return ids, logprobs, list(zip(versions, [0, *starts], strict=True))


def same(one: TokenSequence, other: TokenSequence) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name)) and getattr(one, name).dtype == dtype
        for name, dtype in (("ids", np.int32), ("logprobs", np.float32), ("versions", np.int32))
    )


@given(rollouts(), st.lists(st.integers(0, 30), max_size=5))
def test_a_rollout_split_anywhere_and_joined_is_unchanged(
    rollout: tuple[list[int], list[float], list[tuple[int, int]]], cuts: list[int]
) -> None:
    ids, logprobs, starts = rollout
    full = TokenSequence.join(split_by_version("1-0", 0, ids, logprobs, starts))
    assert full.ids.tolist() == ids
    assert full.logprobs.tolist() == logprobs
    assert (np.diff(full.versions[full.versions != CONTEXT]) >= 0).all()
    for (version, first), last in zip(starts, [*(first for _, first in starts[1:]), len(ids)], strict=True):
        assert set(full.versions[first:last].tolist()) <= {version}

    bounds = sorted({0, len(ids), *(at for at in cuts if at < len(ids))})
    pieces = [split_by_version("1-0", a, ids[a:b], logprobs[a:b], starts) for a, b in pairwise(bounds)]
    segments = [segment for piece in pieces for segment in piece]
    assert same(TokenSequence.join(segments), full)
    assert all(len(segment.ids) > 0 for segment in segments)
    again = full.segments("1-0")
    assert same(TokenSequence.join(again), full)
    assert all(one.version != other.version for one, other in pairwise(again))
    assert [len(piece) > 0 for piece in pieces] == [True] * (len(bounds) - 1)
    for count in range(len(ids) + 1):
        begun = split_by_version("1-0", 0, ids[:count], logprobs[:count], starts)
        assert same(full.slice(0, count), TokenSequence.join(begun))


@given(rollouts().filter(lambda rollout: len(rollout[0]) > 1), st.data())
def test_segments_with_gaps_or_overlaps_are_refused(
    rollout: tuple[list[int], list[float], list[tuple[int, int]]], data: st.DataObject
) -> None:
    ids, logprobs, starts = rollout
    at = data.draw(st.integers(1, len(ids) - 1))
    head = split_by_version("1-0", 0, ids[:at], logprobs[:at], starts)
    tail = split_by_version("1-0", at, ids[at:], logprobs[at:], starts)
    for wrong in (tail, [*head, *head], [*tail, *head], [*head, *tail, *tail]):
        with pytest.raises(ValueError, match="segment from token"):
            TokenSequence.join(wrong)


def of_versions(*versions: int) -> list[Segment]:
    return [Segment("1-0", at, v, np.array([5], np.int32), np.zeros(1, np.float32)) for at, v in enumerate(versions)]


@pytest.mark.parametrize("versions", [(CONTEXT, 4, 3), (4, CONTEXT, 3)])
def test_versions_never_fall(versions: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="goes back from weight version 4 to 3"):
        TokenSequence.join(of_versions(*versions))


def characters(ids: list[int]) -> str:
    return "".join("abc"[token] for token in ids)


@given(
    st.lists(st.integers(0, 2), max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_a_rollout_stops_at_the_token_that_completes_the_first_stop_string(ids: list[int], stop: list[str]) -> None:
    ends = [text.find(one) + len(one) for text in [characters(ids)] for one in stop if one in text]
    assert stopped_at(characters, ids, stop) == min(ends, default=None)


@given(st.text("ab", min_size=1, max_size=12), st.sampled_from(["ab", "b", "ba"]))
def test_tokens_after_a_stop_string_are_cut_whether_or_not_another_engine_began(text: str, stop: str) -> None:
    ids = [ord(letter) for letter in text]

    def decode(tokens: Any) -> str:
        return "".join(map(chr, tokens))

    for cut in range(len(ids)):
        prefix = split_by_version("1-0", 0, ids[:cut], [0.0] * cut, [(0, 0)])
        rest = split_by_version("1-0", cut, ids[cut:], [0.0] * (len(ids) - cut), [(0, 0)])
        request = RolloutRequest("1-0", (1,), Sampling(1.0, 20, None, (stop,)), prefix=tuple(prefix))
        ended = finished(request, segments=rest, reason="length", decode=decode)
        end = text.find(stop) + len(stop) if stop in text else len(text)
        assert (decode(ended.ids), ended.finish_reason) == (text[:end], "stop" if stop in text else "length")
