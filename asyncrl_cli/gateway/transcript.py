"""The token sequences of one rollout: which one a call goes on with, which tokens are sampled in it, what is recorded.

Invariants:

* a sequence only grows at its end: by the tokens that a call is given, then by those that it samples (``end``). What
  a call is asked with is its sequence so far, token for token;
* every sampled token is sampled in one sequence. Another that has it in its history has it as ``CONTEXT``;
* a sequence has at most one call under way. A call that is given up leaves the sequence as it was before;
* what is told (``on_segments``) of a sequence are its tokens from 0 on without gaps. Telling starts over at an earlier
  token only where other tokens than those told take its place.

Tokens that were recorded before, or that a call had sampled when it was given up, lie beyond a sequence's end, as long
as nobody asked for something else there: the call that is asked with the same tokens gets them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from asyncrl_cli.records.generation import CONTEXT, FinishReason, Rollout, Segment, TokenSequence, branch_id
from asyncrl_cli.rollout.client import OnSegments


@dataclass(frozen=True, slots=True)
class Turn:
    """The end of a reply, where a conversation can go on: so many tokens into its sequence.

    ``messages``, of a chat: how many keys tools and messages up to and with the reply have, and the last one. ``text``,
    of a text: all there is up to there.
    """

    end: int
    last_token: int
    messages: tuple[int, str] | None = None
    text: str | None = None


@dataclass(slots=True, eq=False)
class Branch:
    """One sequence. ``known`` are its tokens: ``end`` of them belong to it, those beyond are recorded."""

    number: int
    known: TokenSequence = field(default_factory=TokenSequence.context)
    end: int = 0
    reported: int = 0  # so many of ``known`` were reported
    turns: list[Turn] = field(default_factory=list)
    busy: bool = False
    finish: FinishReason = "length"

    def extends(self, turn: Turn) -> bool:
        """Whether a call may go on from that turn right here, and not in a branch."""
        return not self.busy and turn is self.turns[-1]


@dataclass(slots=True, eq=False)
class Call:
    """One reply that is being generated: the tokens of ``sequence`` from ``first`` on.

    ``replayed`` of them are recorded; ``more`` says that the sequence went on after them, so that they are all.
    """

    branch: Branch
    prompt_ids: tuple[int, ...]
    replayed: TokenSequence
    more: bool
    over: bool = False

    @property
    def first(self) -> int:
        """Where its reply begins in the sequence."""
        return len(self.prompt_ids)

    @property
    def newest(self) -> int:
        """The newest version that sampled a token of the sequence before; 0 when none did."""
        return int(self.branch.known.versions[: self.first].max(initial=0))


class Transcript:
    """All sequences of a rollout."""

    def __init__(
        self, rollout_id: str, recorded: Mapping[int, Sequence[Segment]], on_segments: OnSegments | None
    ) -> None:
        """``recorded``: the segments of each sequence that were told when the rollout was played before."""
        self._rollout_id = rollout_id
        self._on_segments = on_segments
        self._branches: list[Branch] = []
        # Recorded sequences that no call has begun yet: tokens, and how many of them were reported under that number.
        self._recorded = {number: TokenSequence.join(segments) for number, segments in recorded.items()}
        self._reported = {number: len(tokens.ids) for number, tokens in self._recorded.items()}

    def longest(self, covers: Callable[[Branch, Turn], int | None]) -> tuple[Branch, Turn] | None:
        """The turn that covers most of what a call is asked with; among equals one that can be extended.

        ``covers`` says how much a turn covers; None when it is no part of it.
        """
        found = [
            (covered, branch.extends(turn), -branch.number, branch, turn)
            for branch in self._branches
            for turn in branch.turns
            if (covered := covers(branch, turn)) is not None
        ]
        return max(found, key=lambda one: one[:3])[3:] if found else None

    def begin(self, branch: Branch | None, prompt_ids: Sequence[int]) -> Call:
        """A call that is asked with ``prompt_ids``, which begin with all of ``branch``; None begins a branch."""
        prompt = np.asarray(prompt_ids, np.int32)
        if branch is None:
            branch = self._new(prompt)
        end, first = branch.end, len(prompt)
        if not _has(branch.known, end, prompt):
            branch.known = branch.known.slice(0, end).extended(TokenSequence.context(prompt[end:]))
            branch.reported = min(branch.reported, end)
        branch.busy = True
        self._report(branch, first)
        last = first + _run(branch.known.versions[first:])
        more = last < len(branch.known.ids)
        return Call(branch, tuple(prompt_ids), branch.known.slice(first, last), more)

    def grow(self, call: Call, segments: Sequence[Segment]) -> TokenSequence:
        """Tokens that a call has sampled; ``start`` counts from its first. Returns those that are new."""
        branch = call.branch
        fresh = TokenSequence.context()
        for segment in segments:
            known = len(branch.known.ids) - call.first
            if segment.start <= known < segment.end:  # others are known, or come with the whole
                versions = np.full(len(segment.ids), segment.version, np.int32)
                new = TokenSequence(segment.ids, segment.logprobs, versions).slice(known - segment.start, None)
                branch.known = branch.known.extended(new)
                fresh = fresh.extended(new)
        self._report(branch, len(branch.known.ids))
        return fresh

    def end(self, call: Call, sampled: TokenSequence, finish: FinishReason, turn: Turn) -> None:
        """A call has sampled these, and all of them."""
        branch, call.over = call.branch, True
        end = call.first + len(sampled.ids)
        agree = _agreement(branch.known.ids[call.first :], sampled.ids)
        if agree < len(sampled.ids):
            branch.known = branch.known.slice(0, call.first).extended(sampled)
            branch.reported = min(branch.reported, call.first + agree)
        branch.end, branch.finish, branch.busy = end, finish, False
        branch.turns.append(turn)
        self._report(branch, end)

    def give_up(self, call: Call, keep: bool) -> None:
        """A call ends with nothing, unless it has ended. With ``keep``, what it sampled is there for the next one that
        is asked with the same tokens."""
        if call.over:
            return
        branch, call.over = call.branch, True
        branch.busy = False
        if not keep:
            branch.known = branch.known.slice(0, branch.end)
            branch.reported = min(branch.reported, branch.end)
        if branch.end == 0:
            self._recorded[branch.number], self._reported[branch.number] = branch.known, branch.reported

    def rollout(self, decode: Callable[[Sequence[int]], str]) -> Rollout | None:
        """All sequences in which anything was sampled, in the order they began; None when there is none."""
        rollouts = [
            Rollout(
                *branch.known.slice(0, branch.end).arrays,
                rollout_id=branch_id(self._rollout_id, number),
                prompt_ids=(),
                text=decode(branch.known.ids[: branch.end].tolist()),
                finish_reason=branch.finish,
            )
            for number, branch in enumerate(branch for branch in self._branches if branch.end)
        ]
        return replace(rollouts[0], branches=tuple(rollouts[1:])) if rollouts else None

    def _new(self, prompt: NDArray[np.int32]) -> Branch:
        """The next branch, with what is recorded of one that begins like this, wherever it was in the order."""
        unused = (branch for branch in self._branches if branch.end == 0 and not branch.busy)
        branch = next(unused, None)
        if branch is None:
            branch = Branch(len(self._branches))
            self._branches.append(branch)
        number = branch.number
        reported = self._reported.pop(number, 0)
        # The one of the same number first; it is the right one, unless calls came in another order than before.
        for other in sorted(self._recorded, key=lambda other: (other != number, other)):
            if _has(self._recorded[other], 0, prompt):
                branch.known = self._recorded.pop(other)
                branch.reported = reported if other == number else 0
                return branch
        branch.known, branch.reported = TokenSequence.context(), 0
        return branch

    def _report(self, branch: Branch, upto: int) -> None:
        if upto > branch.reported:
            start, branch.reported = branch.reported, upto
            if self._on_segments is not None:
                name = branch_id(self._rollout_id, branch.number)
                self._on_segments(branch.known.slice(start, upto).segments(name, start))


def _has(tokens: TokenSequence, start: int, prompt: NDArray[np.int32]) -> bool:
    """Whether recorded tokens were given, from ``start`` on, just what ``prompt`` has there."""
    first = len(prompt)
    return (
        len(tokens.ids) >= first
        and np.array_equal(tokens.ids[start:first], prompt[start:])
        and bool((tokens.versions[start:first] == CONTEXT).all())
        and bool((tokens.versions[first : first + 1] != CONTEXT).all())
    )


def _agreement(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many ids two lists have in common at their beginning."""
    both = min(len(one), len(other))
    differ = np.flatnonzero(one[:both] != other[:both])
    return int(differ[0]) if len(differ) else both


def _run(versions: NDArray[np.int32]) -> int:
    """How many sampled tokens there are before the next given one."""
    given = np.flatnonzero(versions == CONTEXT)
    return int(given[0]) if len(given) else len(versions)
