"""The tokens so far: one rule for segments that repeat, extend or contradict recorded ones, or leave a gap."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.records.generation import Segment
from asyncrl_cli.records.token_prefix import TokenPrefix

TOKENS = st.tuples(st.integers(0, 1), st.sampled_from([0.0, -0.0]), st.integers(-1, 1))
"""Id, log-prob and version. With few values, tokens often agree; 0.0 and -0.0 have different bits."""
SEGMENTS = st.lists(st.tuples(st.integers(0, 8), st.lists(TOKENS, max_size=6)), max_size=8)
"""Start and tokens."""


def split(start: int, tokens: list[tuple[int, float, int]]) -> list[Segment]:
    """Segments of one version each, and one empty segment if there are no tokens."""
    bounds = [index for index in range(1, len(tokens)) if tokens[index][2] != tokens[index - 1][2]]
    return [
        Segment(
            rollout_id="1-0",
            start=start + first,
            version=tokens[first][2] if tokens else 0,
            ids=np.asarray([token[0] for token in tokens[first:last]], np.int32),
            logprobs=np.asarray([token[1] for token in tokens[first:last]], np.float32),
        )
        for first, last in pairwise([0, *bounds, len(tokens)])
    ]


def bits(segments: list[Segment]) -> list[tuple[int, bytes, int]]:
    """Id, bits of the log-prob, and version of each token."""
    return [
        (int(token), logprob.tobytes(), segment.version)
        for segment in segments
        for token, logprob in zip(segment.ids, segment.logprobs, strict=True)
    ]


@given(SEGMENTS, st.integers(0, 3), st.data())
def test_a_prefix_follows_one_rule_for_every_segment(
    deliveries: list[tuple[int, list[tuple[int, float, int]]]], start: int, data: st.DataObject
) -> None:
    prefix = TokenPrefix(start=start)
    expected: list[tuple[int, bytes, int]] = []  # from token ``start`` on
    for first, tokens in deliveries:
        for segment in split(first, tokens):
            before = list(expected)
            new = bits([segment])[max(start - segment.start, 0) :]
            offset = max(segment.start, start) - start
            if new and offset <= len(expected):
                recorded = expected[offset : offset + len(new)]
                if recorded != new[: len(recorded)]:
                    equal = next(i for i, pair in enumerate(zip(recorded, new, strict=False)) if pair[0] != pair[1])
                    del expected[offset + equal :]
                expected += new[len(expected) - offset :]

            added = prefix.add(segment)
            assert bits(prefix.segments) == expected
            assert [one.start for one in prefix.segments] == [start, *(one.end for one in prefix.segments[:-1])][
                : len(prefix.segments)
            ]
            assert all(len(one.ids) for one in prefix.segments)
            assert prefix.end == start + len(expected)
            if added is None:
                assert expected == before
            else:
                assert added is prefix.segments[-1]
                assert bits([added]) == expected[added.start - start :]
                assert expected[: added.start - start] == before[: added.start - start], "nothing else changed"
    end = data.draw(st.integers(start, start + len(expected)))
    prefix.cut(end)
    assert (bits(prefix.segments), prefix.end) == (expected[: end - start], end)
    assert bits(prefix.take()) == expected[: end - start]
    assert (prefix.segments, prefix.start, prefix.end) == ([], end, end)
