"""The token sequences (branches) of one rollout.

Invariants (decision 0017):

* A branch grows only at its end: by the tokens of a call's prompt, then by the call's sampled tokens
  (``Transcript.end``). A call's prompt begins with all tokens of its branch.
* Every sampled token is sampled in exactly one branch. Other branches have it as ``CONTEXT``.
* A branch has at most one running call. An abandoned call leaves the branch unchanged.
* ``on_segments`` gets a branch's tokens from 0 on, without gaps and each once. It goes back to an earlier token only if
  other tokens replace the reported ones (``TokenPrefix``).

A branch may also know tokens beyond its end: tokens recorded in an earlier play, or sampled by a call that was
abandoned. A call with the same prompt gets them; another prompt replaces them.

A program outside of the run does not begin again when the run does: it has the earlier replies. For it, complete
recorded replies stay in the rollout whether or not a call repeats them (``kept_replies``), and another prompt begins
another branch. Other recorded replies count once a call continues them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from asyncrl_cli.gateway.history import ConversationKey
from asyncrl_cli.records.experts import filled, join_experts
from asyncrl_cli.records.generation import CONTEXT, FinishReason, Rollout, Segment, TokenSequence, branch_id
from asyncrl_cli.records.images import PlacedImage
from asyncrl_cli.records.token_prefix import TokenPrefix
from asyncrl_cli.rollout.open_requests import OnSegments


@dataclass(frozen=True, slots=True)
class ReplyEnd:
    """The end of a reply, at which a conversation can continue: ``end`` tokens into its branch.

    ``messages``: a chat's tools and messages including the reply, for comparison. ``stopped``: a stop string ended the
    reply, so its tokens have more text than its message.
    """

    end: int
    last_token: int
    messages: ConversationKey | None = None
    stopped: bool = False


@dataclass(slots=True, eq=False)
class Branch:
    """One sequence: the first ``length`` tokens of ``prefix``. Tokens beyond are recorded ones."""

    index: int
    prefix: TokenPrefix = field(default_factory=TokenPrefix)  # ``on_segments`` got all of it
    length: int = 0
    turns: list[ReplyEnd] = field(default_factory=list)
    busy: bool = False
    finish: FinishReason = "length"
    images: tuple[PlacedImage, ...] = ()  # of the newest call's prompt; unknown for tokens of an earlier play
    kept_end: int = 0  # end of its ``KeptReplies``

    def images_until(self, end: int) -> tuple[PlacedImage, ...]:
        return images_until(self.images, end)

    def records(self, prompt: NDArray[np.int32], images: tuple[PlacedImage, ...], start: int = 0) -> bool:
        """True if a recorded context from ``start`` on equals the prompt's tokens there, ends with the prompt, and has
        the same images: images of one size have the same tokens."""
        tokens, prompt_length = self.prefix.tokens, len(prompt)
        return (
            len(tokens.ids) >= prompt_length
            and np.array_equal(tokens.ids[start:prompt_length], prompt[start:])
            and bool((tokens.versions[start:prompt_length] == CONTEXT).all())
            and bool((tokens.versions[prompt_length : prompt_length + 1] != CONTEXT).all())
            and self.images_until(prompt_length) == images
        )

    def extends(self, turn: ReplyEnd) -> bool:
        """True if a call may continue the turn in this branch."""
        return not self.busy and turn is self.turns[-1]

    @property
    def trained_length(self) -> int:
        """Number of tokens up to the end of the last complete reply, whether it was sampled or recorded."""
        return max(self.length, min(self.kept_end, self.prefix.end))


@dataclass(frozen=True, slots=True)
class KeptReplies:
    """The complete replies that a branch had when the run stopped: they end before token ``end``."""

    end: int
    finish: FinishReason
    replies: int = 0
    sampled_tokens: int = 0

    @classmethod
    def from_tokens(
        cls,
        tokens: TokenSequence,
        finish_of: Callable[[Sequence[int]], FinishReason],
        max_length: int,
        max_call_tokens: int,
    ) -> KeptReplies | None:
        """The complete replies in recorded tokens. The last one is complete if context follows it, the model or a limit
        of the session ended it. ``finish_of`` returns "stop" for the model's end. None without a complete reply."""
        kept_replies, start = None, 0
        while start < len(tokens.ids):
            is_sampled = tokens.versions[start] != CONTEXT
            length = _run_length(tokens.versions[start:], is_sampled)
            end = start + length
            finish = finish_of(tokens.ids[start:end].tolist()) if is_sampled else "length"
            is_limited = length >= max_call_tokens or end >= max_length
            if is_sampled and (end < len(tokens.ids) or finish == "stop" or is_limited):
                replies, count = (kept_replies.replies, kept_replies.sampled_tokens) if kept_replies else (0, 0)
                kept_replies = cls(end, finish, replies + 1, count + length)
            start = end
        return kept_replies


@dataclass(slots=True, eq=False)
class Call:
    """A running call: it samples the tokens of ``branch`` after its prompt.

    ``replayed``: the tokens of its reply that are recorded. ``has_next``: recorded tokens follow them, so they are the
    complete reply.
    """

    branch: Branch
    prompt_ids: tuple[int, ...]
    replayed: TokenSequence
    has_next: bool
    images: tuple[PlacedImage, ...] = ()  # of the prompt
    is_over: bool = False

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_ids)

    @property
    def is_kept(self) -> bool:
        """True if the call repeats a kept reply."""
        return self.branch.kept_end > self.prompt_length

    @property
    def newest_version(self) -> int:
        """The newest weight version among the prompt's tokens; 0 if none was sampled."""
        return int(self.branch.prefix.tokens.versions[: self.prompt_length].max(initial=0))


class Transcript:
    def __init__(
        self,
        rollout_id: str,
        recorded: Mapping[int, Sequence[Segment]],
        on_segments: OnSegments | None,
        kept_replies: Mapping[int, KeptReplies] | None = None,
    ) -> None:
        """``recorded``: each branch's segments from an earlier play of the rollout. ``kept_replies``: by branch, the
        recorded replies that stay in the rollout; None: the program repeats its calls."""
        self._rollout_id = rollout_id
        self._on_segments = on_segments
        self._branches: list[Branch] = []
        self._replies: list[tuple[Branch, int]] = []  # the branch and end of each complete reply, in order
        # Recorded branches that no call has begun yet, by number.
        self._recorded = {index: Branch(index, TokenPrefix(segments)) for index, segments in recorded.items()}
        for index, replies in (kept_replies or {}).items():
            self._recorded[index].kept_end, self._recorded[index].finish = replies.end, replies.finish
        # A program that continues has other branches than the recorded ones, which the journal has under their numbers.
        self._continues = kept_replies is not None
        self._next_index = 1 + max(self._recorded, default=-1) if self._continues else 0

    @property
    def has_reply(self) -> bool:
        """True if the rollout has a complete reply."""
        return bool(self._trained_branches())

    @property
    def restorable(self) -> bool:
        """True if recorded replies are not yet the turns of a conversation, and the program does not repeat calls."""
        has_more = any(branch.prefix.end > branch.length for branch in self._branches if not branch.busy)
        return self._continues and (bool(self._recorded) or has_more)

    def recorded_reply(
        self, branch: Branch | None, prompt_ids: Sequence[int], images: tuple[PlacedImage, ...]
    ) -> TokenSequence | None:
        """The recorded reply to a prompt, which continues ``branch`` or begins one; None if there is none."""
        prompt = np.asarray(prompt_ids, np.int32)
        branch = branch or next(self._recorded_branches(prompt, images), None)
        if branch is None or not branch.records(prompt, images, branch.length):
            return None
        tokens = branch.prefix.tokens
        end = len(prompt) + _run_length(tokens.versions[len(prompt) :])
        return tokens.slice(len(prompt), end) if end > len(prompt) else None

    def kept_lengths(
        self, branch: Branch | None, prompt_ids: Sequence[int], images: tuple[PlacedImage, ...]
    ) -> list[int]:
        """Tokens of each kept reply to a prompt that no call has repeated yet."""
        prompt = np.asarray(prompt_ids, np.int32)
        branches = list(self._recorded_branches(prompt, images))
        if branch is not None and branch.records(prompt, images, branch.length):
            branches.insert(0, branch)
        return [
            _run_length(branch.prefix.tokens.versions[len(prompt) :])
            for branch in branches
            if branch.kept_end > len(prompt)
        ]

    def longest_turn(self, covers: Callable[[Branch, ReplyEnd], int | None]) -> tuple[Branch, ReplyEnd] | None:
        """The turn that covers most of a call's prompt; among equals, a turn that can be extended.

        ``covers`` returns how much of the prompt a turn covers, or None if the prompt does not begin with it.
        """
        candidates = []
        for branch in self._branches:
            for turn in reversed(branch.turns):  # a later turn of a branch covers more
                if (covered := covers(branch, turn)) is not None:
                    candidates.append((covered, branch.extends(turn), -branch.index, branch, turn))
                    break
        return max(candidates, key=lambda candidate: candidate[:3])[3:] if candidates else None

    def begin(self, branch: Branch | None, prompt_ids: Sequence[int], images: tuple[PlacedImage, ...] = ()) -> Call:
        """Begin a call. ``prompt_ids`` begin with all tokens of ``branch``; without a branch, the call begins one."""
        prompt = np.asarray(prompt_ids, np.int32)
        if branch is not None and branch.kept_end > branch.length and not branch.records(prompt, images, branch.length):
            branch = None  # the recorded tokens stay, for a call that continues them
        if branch is None:
            branch = self._new(prompt, images)
        end, prompt_length = branch.length, len(prompt)
        if not branch.records(prompt, images, end):
            branch.prefix.cut(end)
            self._add(branch, TokenSequence.context(prompt[end:]).segments(self._name(branch), end))
        branch.busy, branch.images = True, images
        tokens = branch.prefix.tokens
        reply_end = prompt_length + _run_length(tokens.versions[prompt_length:])
        return Call(
            branch,
            prompt_ids=tuple(prompt_ids),
            replayed=tokens.slice(prompt_length, reply_end),
            has_next=reply_end < len(tokens.ids),
            images=images,
        )

    def grow(self, call: Call, segments: Sequence[Segment]) -> list[int]:
        """Add a call's sampled tokens; a segment's ``start`` counts from the prompt's end. Returns the new ids."""
        name = self._name(call.branch)
        branch_segments = [
            replace(segment, rollout_id=name, start=call.prompt_length + segment.start) for segment in segments
        ]
        return [token for segment in self._add(call.branch, branch_segments) for token in segment.ids.tolist()]

    def end(self, call: Call, sampled: TokenSequence, finish: FinishReason, turn: ReplyEnd) -> None:
        branch, call.is_over = call.branch, True
        end = call.prompt_length + len(sampled.ids)
        self._add(branch, sampled.segments(self._name(branch), call.prompt_length))
        if isinstance(sampled, Rollout) and sampled.prompt_experts is not None:
            tokens = branch.prefix.tokens
            rows = [(call.prompt_length, sampled.prompt_experts), (len(sampled.ids), sampled.experts)]
            experts = filled(tokens.experts, join_experts([*rows, (len(tokens.ids) - end, None)]))
            branch.prefix = TokenPrefix(replace(tokens, experts=experts).segments(self._name(branch)))
        branch.length, branch.finish, branch.busy = end, finish, False
        branch.turns.append(turn)
        self._replies.append((branch, end))

    def abandon(self, call: Call, keep: bool) -> None:
        """End a call without a reply, unless it has ended. With ``keep``, the next call with the same prompt gets its
        tokens."""
        if call.is_over:
            return
        branch, call.is_over = call.branch, True
        branch.busy = False
        if not keep:
            branch.prefix.cut(branch.length)
        if branch.length == 0:  # a branch without a reply: its tokens are recorded ones, for any call with this prompt
            self._recorded[branch.index] = replace(branch)
            if self._continues:
                self._branches.remove(branch)

    def rollout(self, decode: Callable[[Sequence[int]], str]) -> Rollout | None:
        """All branches with a reply, in the order they began; None if there are none.

        The rollout's finish reason is the last reply's, like the text that is scored. If all replies are of an earlier
        play, it is the newest branch's.
        """
        branches = self._trained_branches()
        if not branches:
            return None
        last_branch = self._replies[-1][0] if self._replies else branches[-1]
        root, *branch_rollouts = [
            Rollout(
                *branch.prefix.tokens.slice(0, branch.trained_length).arrays,
                rollout_id=branch_id(self._rollout_id, index),
                prompt_ids=(),
                text=decode(branch.prefix.tokens.ids[: branch.trained_length].tolist()),
                finish_reason=branch.finish,
                images=branch.images_until(branch.length),
            )
            for index, branch in enumerate(branches)
        ]
        return replace(root, branches=tuple(branch_rollouts), finish_reason=last_branch.finish)

    def _trained_branches(self) -> list[Branch]:
        branches = [branch for branch in (*self._branches, *self._recorded.values()) if branch.trained_length]
        return sorted(branches, key=lambda branch: branch.index)

    def replies(self) -> tuple[tuple[int, int], ...]:
        """For each complete reply, in order: the index of its sequence in ``rollout``, and the index after its last
        token."""
        replied = self._trained_branches()
        indices = {id(branch): index for index, branch in enumerate(replied)}
        return tuple((indices[id(branch)], end) for branch, end in self._replies)

    def _new(self, prompt: NDArray[np.int32], images: tuple[PlacedImage, ...]) -> Branch:
        """Begin a branch. If a recorded branch begins with this prompt, take its tokens, whatever its number."""
        if self._continues and (recorded_branch := next(self._recorded_branches(prompt, images), None)):
            self._branches.append(self._recorded.pop(recorded_branch.index))
            return recorded_branch
        unused = (branch for branch in self._branches if branch.length == 0 and not branch.busy)
        branch = next(unused, None)
        if branch is None:
            branch = Branch(self._next_index)
            self._next_index += 1
            self._branches.append(branch)
        branch.prefix, branch.images = TokenPrefix(), ()
        # First the recorded branch with the same number, which is the right one unless the order of calls has changed.
        for index in sorted(self._recorded, key=lambda index: (index != branch.index, index)):
            if self._recorded[index].records(prompt, images):
                recorded = self._recorded.pop(index).prefix
                if index == branch.index:
                    branch.prefix = recorded
                else:
                    self._add(branch, recorded.tokens.segments(self._name(branch)))
                branch.images = images
                break
        return branch

    def _recorded_branches(self, prompt: NDArray[np.int32], images: tuple[PlacedImage, ...]) -> Iterator[Branch]:
        return (branch for _, branch in sorted(self._recorded.items()) if branch.records(prompt, images))

    def _name(self, branch: Branch) -> str:
        return branch_id(self._rollout_id, branch.index)

    def _add(self, branch: Branch, segments: Sequence[Segment]) -> list[Segment]:
        """Add segments to a branch, and report the new tokens."""
        new_segments = [added for segment in segments if (added := branch.prefix.add(segment)) is not None]
        if new_segments and self._on_segments is not None:
            self._on_segments(new_segments)
        return new_segments


def images_until(images: Sequence[PlacedImage], end: int) -> tuple[PlacedImage, ...]:
    """The images in the first ``end`` tokens."""
    return tuple(placed_image for placed_image in images if placed_image.end <= end)


def _run_length(versions: NDArray[np.int32], is_sampled: bool = True) -> int:
    """Number of sampled tokens before the next context token, or of context tokens before the next sampled token."""
    run_ends = np.flatnonzero((versions != CONTEXT) != is_sampled)
    return int(run_ends[0]) if len(run_ends) else len(versions)
