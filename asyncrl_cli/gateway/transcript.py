"""The token sequences of one rollout: which one a call goes on with, which tokens are sampled in it, what is recorded.

Invariants:

* a sequence only grows at its end: by the tokens that a call is given, then by those that it samples (``end``). What
  a call is asked with is its sequence so far, token for token;
* every sampled token is sampled in one sequence. Another that has it in its history has it as ``GIVEN``;
* a sequence has at most one call under way. A call that is given up leaves the sequence as it was before;
* what is told (``on_segments``) of a sequence are its tokens from 0 on without gaps. Telling starts over at an earlier
  token only where other tokens than those told take its place.

Tokens that were recorded before, or that a call had sampled when it was given up, lie beyond a sequence's end, as long
as nobody asked for something else there: the call that is asked with the same tokens gets them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl_cli.records.generation import GIVEN, FinishReason, Rollout, Segment, branch_id
from asyncrl_cli.rollout.continuation import Tokens, cut, join

OnSegments = Callable[[list[Segment]], None]


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
class TokenSequence:
    """One sequence. ``known`` are its tokens: ``end`` of them belong to it, those beyond are recorded."""

    number: int
    known: Tokens
    end: int = 0
    told: int = 0  # so many of ``known`` were told
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

    sequence: TokenSequence
    prompt_ids: tuple[int, ...]
    replayed: Tokens
    more: bool
    over: bool = False

    @property
    def first(self) -> int:
        """Where its reply begins in the sequence."""
        return len(self.prompt_ids)

    @property
    def newest(self) -> int:
        """The newest version that sampled a token of the sequence before; 0 when none did."""
        return int(self.sequence.known.versions[: self.first].max(initial=0))


class Transcript:
    """All sequences of a rollout."""

    def __init__(
        self, rollout_id: str, recorded: Mapping[int, Sequence[Segment]], on_segments: OnSegments | None
    ) -> None:
        """``recorded``: the segments of each sequence that were told when the rollout was played before."""
        self._rollout_id = rollout_id
        self._on_segments = on_segments
        self._sequences: list[TokenSequence] = []
        # Recorded sequences that no call has begun yet: tokens, and how many of them were told under that number.
        self._recorded = {number: join(segments) for number, segments in recorded.items()}
        self._told = {number: len(tokens.response_ids) for number, tokens in self._recorded.items()}

    def longest(self, covers: Callable[[TokenSequence, Turn], int | None]) -> tuple[TokenSequence, Turn] | None:
        """The turn that covers most of what a call is asked with; among equals one that can be extended.

        ``covers`` says how much a turn covers; None when it is no part of it.
        """
        found = [
            (covered, sequence.extends(turn), -sequence.number, sequence, turn)
            for sequence in self._sequences
            for turn in sequence.turns
            if (covered := covers(sequence, turn)) is not None
        ]
        return max(found, key=lambda one: one[:3])[3:] if found else None

    def begin(self, sequence: TokenSequence | None, prompt_ids: Sequence[int]) -> Call:
        """A call that is asked with ``prompt_ids``, which begin with all of ``sequence``; None begins a sequence."""
        prompt = np.asarray(prompt_ids, np.int32)
        if sequence is None:
            sequence = self._new(prompt)
        end, first = sequence.end, len(prompt)
        if not _has(sequence.known, end, prompt):
            sequence.known = _joined(sequence.known.first(end), _given(prompt[end:]))
            sequence.told = min(sequence.told, end)
        sequence.busy = True
        self._tell(sequence, first)
        last = first + _run(sequence.known.versions[first:])
        more = last < len(sequence.known.response_ids)
        return Call(sequence, tuple(prompt_ids), _slice(sequence.known, first, last), more)

    def grow(self, call: Call, segments: Sequence[Segment]) -> Tokens:
        """Tokens that a call has sampled; ``start`` counts from its first. Returns those that are new."""
        sequence = call.sequence
        fresh = _given(())
        for segment in segments:
            known = len(sequence.known.response_ids) - call.first
            if segment.start <= known < segment.end:  # others are known, or come with the whole
                new = _slice(_of(segment), known - segment.start, len(segment.response_ids))
                sequence.known = _joined(sequence.known, new)
                fresh = _joined(fresh, new)
        self._tell(sequence, len(sequence.known.response_ids))
        return fresh

    def end(self, call: Call, sampled: Tokens, finish: FinishReason, turn: Turn) -> None:
        """A call has sampled these, and all of them."""
        sequence, call.over = call.sequence, True
        end = call.first + len(sampled.response_ids)
        agree = _agreement(sequence.known.response_ids[call.first :], sampled.response_ids)
        if agree < len(sampled.response_ids):
            sequence.known = _joined(sequence.known.first(call.first), sampled)
            sequence.told = min(sequence.told, call.first + agree)
        sequence.end, sequence.finish, sequence.busy = end, finish, False
        sequence.turns.append(turn)
        self._tell(sequence, end)

    def give_up(self, call: Call, keep: bool) -> None:
        """A call ends with nothing, unless it has ended. With ``keep``, what it sampled is there for the next one that
        is asked with the same tokens."""
        if call.over:
            return
        sequence, call.over = call.sequence, True
        sequence.busy = False
        if not keep:
            sequence.known = sequence.known.first(sequence.end)
            sequence.told = min(sequence.told, sequence.end)
        if sequence.end == 0:
            self._recorded[sequence.number], self._told[sequence.number] = sequence.known, sequence.told

    def rollout(self, decode: Callable[[Sequence[int]], str]) -> Rollout | None:
        """All sequences in which anything was sampled, in the order they began; None when there is none."""
        rollouts: list[Rollout] = []
        for sequence in self._sequences:
            if sequence.end:
                tokens = sequence.known.first(sequence.end)
                rollouts.append(
                    Rollout(
                        rollout_id=branch_id(self._rollout_id, len(rollouts)),
                        prompt_ids=(),
                        response_ids=tokens.response_ids,
                        logprobs=tokens.logprobs,
                        versions=tokens.versions,
                        text=decode(tokens.response_ids.tolist()),
                        finish_reason=sequence.finish,
                    )
                )
        if not rollouts:
            return None
        first, *branches = rollouts
        return Rollout(
            *(first.rollout_id, (), first.response_ids, first.logprobs, first.versions, first.text),
            first.finish_reason,
            tuple(branches),
        )

    def _new(self, prompt: NDArray[np.int32]) -> TokenSequence:
        """The next sequence, with what is recorded of one that begins like this, wherever it was in the order."""
        unused = (sequence for sequence in self._sequences if sequence.end == 0 and not sequence.busy)
        sequence = next(unused, None)
        if sequence is None:
            sequence = TokenSequence(len(self._sequences), _given(()))
            self._sequences.append(sequence)
        number = sequence.number
        told = self._told.pop(number, 0)
        # The one of the same number first; it is the right one, unless calls came in another order than before.
        for other in sorted(self._recorded, key=lambda other: (other != number, other)):
            if _has(self._recorded[other], 0, prompt):
                sequence.known = self._recorded.pop(other)
                sequence.told = told if other == number else 0
                return sequence
        sequence.known, sequence.told = _given(()), 0
        return sequence

    def _tell(self, sequence: TokenSequence, upto: int) -> None:
        if upto > sequence.told:
            start, sequence.told = sequence.told, upto
            if self._on_segments is not None:
                name = branch_id(self._rollout_id, sequence.number)
                tokens = _slice(sequence.known, start, upto)
                changes = np.flatnonzero(np.diff(tokens.versions, prepend=tokens.versions[0] - 1))
                starts = [(int(tokens.versions[at]), start + int(at)) for at in changes]
                self._on_segments(cut(name, start, tokens.response_ids, tokens.logprobs, starts))


def _has(tokens: Tokens, start: int, prompt: NDArray[np.int32]) -> bool:
    """Whether recorded tokens were given, from ``start`` on, just what ``prompt`` has there."""
    first = len(prompt)
    return (
        len(tokens.response_ids) >= first
        and np.array_equal(tokens.response_ids[start:first], prompt[start:])
        and bool((tokens.versions[start:first] == GIVEN).all())
        and bool((tokens.versions[first : first + 1] != GIVEN).all())
    )


def _agreement(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many ids two lists have in common at their beginning."""
    both = min(len(one), len(other))
    differ = np.flatnonzero(one[:both] != other[:both])
    return int(differ[0]) if len(differ) else both


def _run(versions: NDArray[np.int32]) -> int:
    """How many sampled tokens there are before the next given one."""
    given = np.flatnonzero(versions == GIVEN)
    return int(given[0]) if len(given) else len(versions)


def _given(ids: Sequence[int] | NDArray[np.int32]) -> Tokens:
    count = len(ids)
    return Tokens(np.asarray(ids, np.int32), np.zeros(count, np.float32), np.full(count, GIVEN, np.int32))


def _of(segment: Segment) -> Tokens:
    return Tokens(segment.response_ids, segment.logprobs, np.full(len(segment.response_ids), segment.version, np.int32))


def _slice(tokens: Tokens, start: int, end: int) -> Tokens:
    return Tokens(tokens.response_ids[start:end], tokens.logprobs[start:end], tokens.versions[start:end])


def _joined(one: Tokens, other: Tokens) -> Tokens:
    return Tokens(
        np.concatenate([one.response_ids, other.response_ids]),
        np.concatenate([one.logprobs, other.logprobs]),
        np.concatenate([one.versions, other.versions]),
    )
