"""The tokens so far of a sequence that is still being generated.

One rule decides what a further segment does, wherever tokens are kept (engine worker, generation client, gateway,
episodes, journal):

* it begins after the end: the gap cannot be filled, so it is ignored; the finished rollout has all tokens;
* it repeats recorded tokens, as a second delivery does: nothing changes;
* it extends them: its tokens after the end are added, whether or not it overlaps;
* it contradicts them: the sequence was generated again from the first token that differs, so the recorded tokens from
  there on are dropped.

Invariant: the segments follow one another without gaps or overlaps.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from asyncrl_cli.records.generation import Segment, TokenSequence


class TokenPrefix:
    """A sequence's tokens so far, to which segments are added by the rule above."""

    def __init__(self, segments: Iterable[Segment] = (), start: int = 0) -> None:
        """``segments`` follow one another from token ``start`` on. Tokens before ``start`` are somewhere else."""
        self.start = start
        self.segments = list(segments)
        self._tokens: TokenSequence | None = None

    @property
    def end(self) -> int:
        """The index after the last token."""
        return self.segments[-1].end if self.segments else self.start

    @property
    def tokens(self) -> TokenSequence:
        """All tokens. Raises the errors of ``TokenSequence.join``."""
        if self._tokens is None:
            self._tokens = TokenSequence.join(self.segments)
        return self._tokens

    def add(self, segment: Segment) -> Segment | None:
        """Add a segment. Returns its new tokens, which replace all recorded tokens from their first one on; None if
        nothing changed."""
        added = segment.slice(self.start)
        if added is None or added.start > self.end:
            return None
        if added.start < self.end:
            for recorded in [recorded for recorded in self.segments if recorded.end > added.start]:
                added = added.slice(added.start + _agreement(recorded.slice(added.start), added))
                if added is None:
                    return None
                if added.start < recorded.end:
                    self.cut(added.start)
                    break
        self.segments.append(added)
        self._tokens = None
        return added

    def cut(self, end: int) -> None:
        """Drop the tokens from index ``end`` on."""
        self._tokens = None
        while self.segments and self.segments[-1].end > end:
            if head := self.segments.pop().slice(0, end):
                self.segments.append(head)

    def take(self) -> list[Segment]:
        """Return the segments, and go on after their last token without them."""
        segments, self.start = self.segments, self.end
        self.segments, self._tokens = [], None
        return segments


def _agreement(recorded: Segment | None, segment: Segment) -> int:
    """Number of tokens at the beginning that have equal ids, versions and bits of log-probs."""
    if recorded is None or recorded.version != segment.version:
        return 0
    count = min(len(recorded.ids), len(segment.ids))
    differences = np.flatnonzero(
        (recorded.ids[:count] != segment.ids[:count])
        | (recorded.logprobs[:count].view(np.int32) != segment.logprobs[:count].view(np.int32))
    )
    return int(differences[0]) if len(differences) else count
