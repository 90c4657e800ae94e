"""The token sequences of one rollout: which one a call continues, which tokens are sampled in it, what is recorded.

Invariants (decision 0017):

* a branch only grows at its end: by the tokens of a call's prompt, then by those that it samples (``end``). The prompt
  of a call begins with its branch so far, token for token;
* every sampled token is sampled in one branch. Another that has it in its history has it as ``CONTEXT``;
* a branch has at most one call under way. A call that is abandoned leaves the branch as it was before;
* ``on_segments`` gets a branch's tokens from 0 on without gaps. It starts over at an earlier token only where other
  tokens take the place of those reported.

Tokens that were recorded before, or that a call had sampled when it was abandoned, lie beyond a branch's end until
another prompt replaces them: a call with the same prompt gets them.
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
    """The end of a reply, where a conversation can continue: ``end`` tokens into its branch.

    ``messages``, of a chat: the tools and the messages up to the reply, to be compared. ``text``, of a completion: the
    text up to there. ``stopped``: a stop string ended the reply, so its tokens have more text than its message.
    """

    end: int
    last_token: int
    messages: History | None = None
    text: str | None = None
    stopped: bool = False


@dataclass(slots=True, eq=False)
class Branch:
    """One sequence. The first ``end`` tokens of ``known`` belong to it; those beyond are recorded."""

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
        """Whether a call may continue that turn in this branch."""
        return not self.busy and turn is self.turns[-1]


@dataclass(slots=True, eq=False)
class Call:
    """One reply that is being generated: the tokens of ``branch`` from ``first`` on.

    ``replayed`` of them are recorded; with ``more`` the branch continued after them, so they are the complete reply.
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
        """The newest version that sampled a token of the branch before; 0 when none did."""
        return int(self.branch.known.versions[: self.first].max(initial=0))


class Transcript:
    def __init__(
        self, rollout_id: str, recorded: Mapping[int, Sequence[Segment]], on_segments: OnSegments | None
    ) -> None:
        """``recorded``: the segments of each branch from an earlier play of the rollout."""
        self._rollout_id = rollout_id
        self._on_segments = on_segments
        self._branches: list[Branch] = []
        self._replies: list[tuple[Branch, int]] = []  # the branch and end of each complete reply, in their order
        # Recorded branches that no call has begun yet: tokens, and how many of them were reported under that number.
        self._recorded = {number: TokenSequence.join(segments) for number, segments in recorded.items()}
        self._reported = {number: len(tokens.ids) for number, tokens in self._recorded.items()}

    def longest(self, covers: Callable[[Branch, Turn], int | None]) -> tuple[Branch, Turn] | None:
        """The turn that covers most of a call's prompt; among equals one that can be extended.

        ``covers`` returns how much a turn covers; None when the prompt does not begin with it.
        """
        found = [
            (covered, branch.extends(turn), -branch.number, branch, turn)
            for branch in self._branches
            for turn in branch.turns
            if (covered := covers(branch, turn)) is not None
        ]
        return max(found, key=lambda candidate: candidate[:3])[3:] if found else None

    def begin(self, branch: Branch | None, prompt_ids: Sequence[int], images: tuple[PlacedImage, ...] = ()) -> Call:
        """Begin a call with ``prompt_ids`` and the ``images`` in them, which begin with all of ``branch``; None begins
        a branch."""
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
        """Add tokens that a call has sampled; ``start`` counts from its first. Returns those that are new."""
        branch = call.branch
        fresh = TokenSequence.context()
        for segment in segments:
            known = len(branch.known.ids) - call.first
            if segment.start <= known < segment.end:  # earlier ones are known, later ones come with the rollout
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
        if agree < len(sampled.ids):
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
        """End a call without a reply, unless it has ended. With ``keep``, the next call with the same prompt gets what
        it sampled."""
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
        """All branches in which anything was sampled, in the order they began; None when there is none."""
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
        """For each complete reply, in their order, its sequence in ``rollout`` and the token before which it ends."""
        numbers = {id(branch): number for number, branch in enumerate(one for one in self._branches if one.end)}
        return tuple((numbers[id(branch)], end) for branch, end in self._replies)

    def _new(self, prompt: NDArray[np.int32]) -> Branch:
        """The next branch, with the recorded tokens of one that begins with this prompt, whatever its number."""
        unused = (branch for branch in self._branches if branch.end == 0 and not branch.busy)
        branch = next(unused, None)
        if branch is None:
            branch = Branch(len(self._branches))
            self._branches.append(branch)
        number = branch.number
        reported = self._reported.pop(number, 0)
        # The one with the same number first: it is the right one unless calls come in another order than before.
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
    """Whether the recorded context from ``start`` on is what ``prompt`` has there, and no longer."""
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
    """The number of sampled tokens before the next token of context."""
    context = np.flatnonzero(versions == CONTEXT)
    return int(context[0]) if len(context) else len(versions)
