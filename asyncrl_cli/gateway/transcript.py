"""The token sequences (branches) of one rollout.

Invariants (decision 0017):

* A branch grows only at its end: by the tokens of a call's prompt, then by the call's sampled tokens (``end``). A
  call's prompt begins with all tokens of its branch.
* Every sampled token is sampled in exactly one branch. Other branches have it as ``CONTEXT``.
* A branch has at most one running call. An abandoned call leaves the branch unchanged.
* ``on_segments`` gets a branch's tokens from 0 on, without gaps. It goes back to an earlier token only if other tokens
  replace those that it reported.

A branch may also know tokens beyond its end: tokens recorded in an earlier play, or sampled by a call that was
abandoned. A call with the same prompt gets them; another prompt replaces them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from asyncrl_cli.gateway.history import History
from asyncrl_cli.records.experts import filled, join_experts
from asyncrl_cli.records.generation import CONTEXT, FinishReason, Rollout, Segment, TokenSequence, branch_id
from asyncrl_cli.records.images import PlacedImage
from asyncrl_cli.rollout.open_requests import OnSegments


@dataclass(frozen=True, slots=True)
class Turn:
    """The end of a reply, at which a conversation can continue: ``end`` tokens into its branch.

    ``messages``: a chat's tools and messages including the reply, for comparison. ``text``: a completion's text
    including the reply. ``stopped``: a stop string ended the reply, so its tokens have more text than its message.
    """

    end: int
    last_token: int
    messages: History | None = None
    text: str | None = None
    stopped: bool = False


@dataclass(slots=True, eq=False)
class Branch:
    """One sequence: the first ``end`` tokens of ``known``. Tokens beyond are recorded ones."""

    number: int
    known: TokenSequence = field(default_factory=TokenSequence.context)
    end: int = 0
    reported: int = 0  # tokens of ``known`` that ``on_segments`` got
    turns: list[Turn] = field(default_factory=list)
    busy: bool = False
    finish: FinishReason = "length"
    images: tuple[PlacedImage, ...] = ()  # of the newest call's prompt

    def images_until(self, end: int) -> tuple[PlacedImage, ...]:
        """The images in the first ``end`` tokens."""
        return tuple(placed for placed in self.images if placed.end <= end)

    def extends(self, turn: Turn) -> bool:
        """True if a call may continue the turn in this branch."""
        return not self.busy and turn is self.turns[-1]


@dataclass(slots=True, eq=False)
class Call:
    """A running call: it samples the tokens of ``branch`` from ``first`` on.

    ``replayed``: the tokens of its reply that are recorded. ``more``: recorded tokens follow them, so they are the
    complete reply.
    """

    branch: Branch
    prompt_ids: tuple[int, ...]
    replayed: TokenSequence
    more: bool
    images: tuple[PlacedImage, ...] = ()  # of the prompt
    over: bool = False

    @property
    def first(self) -> int:
        return len(self.prompt_ids)

    @property
    def newest(self) -> int:
        """The newest weight version among the prompt's tokens; 0 if none was sampled."""
        return int(self.branch.known.versions[: self.first].max(initial=0))


class Transcript:
    def __init__(
        self, rollout_id: str, recorded: Mapping[int, Sequence[Segment]], on_segments: OnSegments | None
    ) -> None:
        """``recorded``: each branch's segments from an earlier play of the rollout."""
        self._rollout_id = rollout_id
        self._on_segments = on_segments
        self._branches: list[Branch] = []
        self._replies: list[tuple[Branch, int]] = []  # the branch and end of each complete reply, in order
        # By branch number: tokens of recorded branches that no call has begun yet, and the number of tokens reported.
        self._recorded = {number: TokenSequence.join(segments) for number, segments in recorded.items()}
        self._reported = {number: len(tokens.ids) for number, tokens in self._recorded.items()}

    def longest(self, covers: Callable[[Branch, Turn], int | None]) -> tuple[Branch, Turn] | None:
        """The turn that covers most of a call's prompt; among equals, a turn that can be extended.

        ``covers`` returns how much of the prompt a turn covers, or None if the prompt does not begin with it.
        """
        found = [
            (covered, branch.extends(turn), -branch.number, branch, turn)
            for branch in self._branches
            for turn in branch.turns
            if (covered := covers(branch, turn)) is not None
        ]
        return max(found, key=lambda candidate: candidate[:3])[3:] if found else None

    def begin(self, branch: Branch | None, prompt_ids: Sequence[int], images: tuple[PlacedImage, ...] = ()) -> Call:
        """Begin a call. ``prompt_ids`` begin with all tokens of ``branch``; without a branch, the call begins one."""
        prompt = np.asarray(prompt_ids, np.int32)
        if branch is None:
            branch = self._new(prompt)
        end, first = branch.end, len(prompt)
        if not _has(branch.known, end, prompt):
            branch.known = branch.known.slice(0, end).extended(TokenSequence.context(prompt[end:]))
            branch.reported = min(branch.reported, end)
        branch.busy, branch.images = True, images
        self._report(branch, first)
        last = first + _run(branch.known.versions[first:])
        more = last < len(branch.known.ids)
        return Call(
            branch, prompt_ids=tuple(prompt_ids), replayed=branch.known.slice(first, last), more=more, images=images
        )

    def grow(self, call: Call, segments: Sequence[Segment]) -> TokenSequence:
        """Add a call's sampled tokens; a segment's ``start`` counts from ``call.first``. Returns the new tokens."""
        branch = call.branch
        fresh = TokenSequence.context()
        for segment in segments:
            known = len(branch.known.ids) - call.first
            if segment.start <= known < segment.end:  # other segments are known, or come later with the whole rollout
                versions = np.full(len(segment.ids), segment.version, np.int32)
                tokens = TokenSequence(
                    segment.ids, logprobs=segment.logprobs, versions=versions, experts=segment.experts
                )
                new = tokens.slice(known - segment.start, None)
                branch.known = branch.known.extended(new)
                fresh = fresh.extended(new)
        self._report(branch, len(branch.known.ids))
        return fresh

    def end(self, call: Call, sampled: TokenSequence, finish: FinishReason, turn: Turn) -> None:
        branch, call.over = call.branch, True
        end = call.first + len(sampled.ids)
        agree = _agreement(branch.known.ids[call.first :], sampled.ids)
        if agree < len(sampled.ids):  # other tokens than those reported: report again from the first difference
            branch.known = branch.known.slice(0, call.first).extended(sampled)
            branch.reported = min(branch.reported, call.first + agree)
        if isinstance(sampled, Rollout) and sampled.prompt_experts is not None:
            later = len(branch.known.ids) - end
            given = [(call.first, sampled.prompt_experts), (len(sampled.ids), sampled.experts), (later, None)]
            branch.known = replace(branch.known, experts=filled(branch.known.experts, join_experts(given)))
        branch.end, branch.finish, branch.busy = end, finish, False
        branch.turns.append(turn)
        self._replies.append((branch, end))
        self._report(branch, end)

    def abandon(self, call: Call, keep: bool) -> None:
        """End a call without a reply, unless it has ended. With ``keep``, the next call with the same prompt gets its
        tokens."""
        if call.over:
            return
        branch, call.over = call.branch, True
        branch.busy = False
        if not keep:
            branch.known = branch.known.slice(0, branch.end)
            branch.reported = min(branch.reported, branch.end)
        if branch.end == 0:  # a branch without a reply: its tokens are recorded ones, for any call with this prompt
            self._recorded[branch.number], self._reported[branch.number] = branch.known, branch.reported

    def rollout(self, decode: Callable[[Sequence[int]], str]) -> Rollout | None:
        """All branches with a reply, in the order they began; None if there are none."""
        rollouts = [
            Rollout(
                *branch.known.slice(0, branch.end).arrays,
                rollout_id=branch_id(self._rollout_id, number),
                prompt_ids=(),
                text=decode(branch.known.ids[: branch.end].tolist()),
                finish_reason=branch.finish,
                images=branch.images_until(branch.end),
            )
            for number, branch in enumerate(branch for branch in self._branches if branch.end)
        ]
        return replace(rollouts[0], branches=tuple(rollouts[1:])) if rollouts else None

    def replies(self) -> tuple[tuple[int, int], ...]:
        """For each complete reply, in order: the index of its sequence in ``rollout``, and the index after its last
        token."""
        numbers = {id(branch): number for number, branch in enumerate(one for one in self._branches if one.end)}
        return tuple((numbers[id(branch)], end) for branch, end in self._replies)

    def _new(self, prompt: NDArray[np.int32]) -> Branch:
        """Begin a branch. If a recorded branch begins with this prompt, take its tokens, whatever its number."""
        unused = (branch for branch in self._branches if branch.end == 0 and not branch.busy)
        branch = next(unused, None)
        if branch is None:
            branch = Branch(len(self._branches))
            self._branches.append(branch)
        number = branch.number
        reported = self._reported.pop(number, 0)
        # First the recorded branch with the same number, which is the right one unless the order of calls has changed.
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
    """True if the recorded context from ``start`` on equals the prompt's tokens there, and ends with the prompt."""
    first = len(prompt)
    return (
        len(tokens.ids) >= first
        and np.array_equal(tokens.ids[start:first], prompt[start:])
        and bool((tokens.versions[start:first] == CONTEXT).all())
        and bool((tokens.versions[first : first + 1] != CONTEXT).all())
    )


def _agreement(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Length of the common beginning of two lists of ids."""
    both = min(len(one), len(other))
    differ = np.flatnonzero(one[:both] != other[:both])
    return int(differ[0]) if len(differ) else both


def _run(versions: NDArray[np.int32]) -> int:
    """Number of sampled tokens before the next context token."""
    context = np.flatnonzero(versions == CONTEXT)
    return int(context[0]) if len(context) else len(versions)
