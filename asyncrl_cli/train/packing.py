"""Turns a batch's rollouts of any length into micro-batches of bounded size, the same number on every rank.

Every token sequence of a rollout is a row. Only tokens that the policy sampled count; the others are context. Rows
with a common prefix are computed together, as a tree (prefix_trees.py); any other row is alone in its tree.

Invariant: a micro-batch's size is at most ``tokens_per_microbatch``, or it is a single longer row. The size counts
computed tokens: the number of trees times the largest one if they are padded, the sum of trees if they are packed.

Every rank gets the same number of micro-batches. Under ZeRO-3 each forward and backward pass is a collective call: a
rank with one pass less would leave the others waiting forever. A rank without rows for a micro-batch has an empty list
there, and ``pad_rows([])`` makes it a row in which nothing counts.

The plan depends only on the rows, and is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl_cli.records.experts import join_experts
from asyncrl_cli.records.generation import Rollout, TokenSequence, sequence_of
from asyncrl_cli.records.images import PlacedImage
from asyncrl_cli.records.rewards import Turn
from asyncrl_cli.records.training import TrainingBatch
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.model.images import ImageInputs, Vision
from asyncrl_cli.train.model.pass_layout import PassLayout
from asyncrl_cli.train.model.sequence_parallel import SequenceGroup
from asyncrl_cli.train.prefix_trees import Keys, PrefixTree, TreeLayout, divided

DUMMY_TOKENS = 2
"""Length of the row that stands for an empty micro-batch: the shortest with a token to predict."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """One token sequence of a rollout, up to the last token that the policy sampled."""

    tokens: TokenSequence  # prompt and response; all except CONTEXT count in the loss
    version: int  # the weight version that trains it
    on_policy: bool  # tokens of this version were sampled with the very weights that the step starts with
    rollout: int  # index in the step of the rollout with the row's reward
    turns: NDArray[np.int32]  # index of each token's turn in the rollout; 0 where turns are not recorded
    images: tuple[PlacedImage, ...] = ()  # in ``tokens``

    def __len__(self) -> int:
        """Number of tokens of prompt and response together."""
        return len(self.tokens.ids)

    def keys(self) -> Keys:
        """Return a key for every token but the last: its id or its image, and the experts of its pass."""
        ids = self.tokens.ids[:-1].astype(np.int64)
        for placed_image in self.images:  # an image's features replace its tokens' embeddings
            ids[placed_image.offset : placed_image.offset + placed_image.length] = -1 - int(
                placed_image.image.digest[:15], 16
            )
        if self.tokens.experts is None:
            return ids
        key_bytes = np.hstack(
            [ids[:, None].view(np.uint8), np.ascontiguousarray(self.tokens.experts[1:]).view(np.uint8)]
        )
        return key_bytes.view(f"V{key_bytes.shape[1]}")[:, 0]


@dataclass(frozen=True, slots=True, eq=False)
class PaddedRows:
    """A micro-batch, padded on the right. Entry [r, t] of every matrix [rows, T] is about token ``input_ids[r, t]``.

    T is the longest row. A model's logits at t − 1 predict token t, so column 0 of log-probs is empty: it belongs to a
    prompt's first token, where the mask is false.
    """

    input_ids: Tensor  # int64; 0 after a row's end
    response_mask: Tensor  # bool; true where a token counts in the loss
    behaviour_logprobs: Tensor  # float32; log-prob that a token was sampled with
    on_policy: Tensor  # bool; true where the token was sampled with the weights at the start of the step
    rollouts: Tensor  # int64, [rows]; 0 in the row of an empty micro-batch
    turns: Tensor  # int64, [rows, T]; the index of a token's turn in its rollout
    experts: Tensor | None = None  # uint8 or int32, [rows, T, layers · k] (records/experts.py); None: not recorded
    images: ImageInputs | None = None  # None: the model sees no images
    trees: TreeLayout | None = None  # None: no position is shared. Otherwise experts and images are by tree
    layout: PassLayout | None = None  # of a pass over these rows; None: the model makes it

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Arguments of policy and critic: ``images``, ``trees`` and ``layout``, unless they are None."""
        arguments = {"images": self.images, "trees": self.trees, "layout": self.layout}
        return {name: value for name, value in arguments.items() if value is not None}

    @property
    def policy_arguments(self) -> dict[str, Any]:
        """Arguments of the policy: ``model_arguments``, and the recorded ``experts``."""
        return self.model_arguments if self.experts is None else {**self.model_arguments, "experts": self.experts}


def longest_response(rollout: Rollout) -> int:
    """Return the tokens of the longest response to a single call of the policy, over the rollout's sequences."""
    longest_run = 0
    for sequence in rollout.sequences:
        edges = np.flatnonzero(np.diff(sequence.sampled, prepend=False, append=False))
        longest_run = max(longest_run, int((edges[1::2] - edges[::2]).max(initial=0)))
    return longest_run


def training_rows(batch: TrainingBatch, uniform: Tensor, spec: ExperimentSpec) -> list[list[TrainingRow]]:
    """Return each group's rows to learn from, in the order of rollouts and their sequences.

    A token is on-policy if it was sampled with the very weights that the trainer has at the start of the step. These
    are a published version's weights only in the first step after a publish. With ``weight_update: keep`` all sampled
    tokens of the sequence must have that version: if the sequence began under an older version, its later tokens
    depend on keys and values of older weights.

    Returns a list for each group (all have ``group_size`` rollouts). It is empty for ``uniform`` groups (bool,
    [groups]) if the spec skips them. Masked rollouts have no rows. A row's ``rollout`` is its index among all rollouts
    of the step.
    """
    skips = spec.algorithm.uniform_groups == "skip"
    return [[] if skips and uniform[index] else list(_rows(batch, index, spec)) for index in range(len(batch.groups))]


def _rows(batch: TrainingBatch, group: int, spec: ExperimentSpec) -> Iterator[TrainingRow]:
    rollouts, rewards, turns = batch.groups[group].rollouts, batch.groups[group].rewards, batch.groups[group].turns
    at_a_version = batch.step % spec.pipeline.publish_every == 0
    # vLLM computes a rollout's context again after an update, but returns no experts of that (``router_replay``).
    recomputes = spec.pipeline.weight_update != "keep" and not spec.algorithm.router_replay
    for index, rollout in enumerate(rollouts):
        if rewards[index] is None or (spec.algorithm.mask_truncated and not rollout.finished):
            continue
        for sequence in rollout.sequences:
            if not (sampled := sequence.sampled).any():
                continue
            one_version = bool((sequence.versions[sampled] == batch.version).all())
            exact = at_a_version and (one_version or recomputes)
            trained_tokens = sequence.slice(0, np.flatnonzero(sampled)[-1] + 1)  # no loss depends on later tokens
            tokens = TokenSequence.context(sequence.prompt_ids, sequence.prompt_experts).extended(trained_tokens)
            yield TrainingRow(
                tokens,
                version=batch.version,
                on_policy=exact,
                rollout=group * len(rollouts) + index,
                turns=_turn_of_tokens(turns[index] if turns else (), sequence, len(tokens.ids)),
                images=tuple(placed_image for placed_image in sequence.images if placed_image.offset < len(tokens.ids)),
            )


def _turn_of_tokens(turns: Sequence[Turn], sequence: Rollout, tokens: int) -> NDArray[np.int32]:
    """Index of the turn that ends at or after each of the first ``tokens`` tokens of a sequence with its prompt; the
    last turn's index after that."""
    branch = sequence_of(sequence.rollout_id)[-1]
    turn_ends = [
        (len(sequence.prompt_ids) + turn.end, index) for index, turn in enumerate(turns) if turn.branch == branch
    ]
    ends, turn_indices = np.array([*turn_ends, (tokens, max(0, len(turns) - 1))], np.int32).T
    turn_of_token: NDArray[np.int32] = turn_indices[
        np.minimum(np.searchsorted(ends, np.arange(tokens), side="right"), len(ends) - 1)
    ]
    return turn_of_token


def count_tokens(rows: Sequence[TrainingRow]) -> int:
    """Tokens of the rows that count in the loss."""
    return sum(int(row.tokens.sampled.sum()) for row in rows)


def plan_microbatches(
    lengths: Sequence[int], tokens_per_microbatch: int, ranks: int, packing: bool = False
) -> list[list[list[int]]]:
    """Group trees, here called rows, into micro-batches for each rank.

    With sequence parallelism a rank stands for all ranks that share its rows. Rows go to ranks from the longest to the
    shortest (``divided``). A rank puts its rows, in this order, into the first micro-batch with room (first-fit
    decreasing). If they are padded, no other grouping needs fewer micro-batches, because each begins with its longest
    row; if they are packed, the best grouping may need 2 in 11 fewer (G. Dósa, 2007). A rank with fewer micro-batches
    than another gets empty ones.

    Returns:
        ``plan[rank][microbatch]``: indices into ``lengths``, from the longest row to the shortest. Every index occurs
        once. Every rank has the same number of micro-batches, at least one.
    """
    plan = [
        _fill(rows, lengths=lengths, tokens_per_microbatch=tokens_per_microbatch, packing=packing)
        for rows in divided(lengths, ranks)
    ]
    microbatch_count = max(1, *(len(microbatches) for microbatches in plan))
    return [microbatches + [[] for _ in range(microbatch_count - len(microbatches))] for microbatches in plan]


def _fill(rows: Sequence[int], lengths: Sequence[int], tokens_per_microbatch: int, packing: bool) -> list[list[int]]:
    microbatches: list[list[int]] = []
    sizes: list[int] = []
    for row in rows:
        for index, microbatch in enumerate(microbatches):
            added_tokens = lengths[row] if packing else lengths[microbatch[0]]
            if sizes[index] + added_tokens <= tokens_per_microbatch:
                microbatch.append(row)
                sizes[index] += added_tokens
                break
        else:
            microbatches.append([row])
            sizes.append(lengths[row])
    return microbatches


def microbatch(
    rows: Sequence[TrainingRow],
    trees: Sequence[PrefixTree],
    vision: Vision | None,
    packing: bool,
    sequence: SequenceGroup | None = None,
) -> PaddedRows:
    """Make the tensors, on the CPU, of a micro-batch with some ``trees`` of the minibatch's ``rows``. ``sequence``: as
    in ``PassLayout.of``."""
    rows_in_trees = [rows[row] for tree in trees for row in tree.rows]
    if all(len(tree.rows) == 1 for tree in trees):
        padded = pad_rows(rows_in_trees, vision)
    else:
        tree_layout = TreeLayout.of(trees, max(map(len, rows_in_trees)), packing)
        shared = [shared_count for tree in trees for shared_count in tree.shared]
        padded = pad_rows(rows_in_trees, vision, tree_layout, shared)
    return replace(padded, layout=PassLayout.of(padded.response_mask, packing, padded.trees, sequence))


def pad_rows(
    rows: Sequence[TrainingRow],
    vision: Vision | None = None,
    trees: TreeLayout | None = None,
    shared: Sequence[int] | None = None,
) -> PaddedRows:
    """Make a micro-batch's tensors, on the CPU. ``vision``: None for a model without images.

    ``trees``: the rows' trees, and ``shared`` each row's number of shared positions; None: no position is shared.
    Without rows: one row of two tokens that do not count, for an ordinary forward pass. Raises ``ValueError`` when a
    row begins with a sampled token, which would have no context.
    """
    if not rows:
        empty = TokenSequence.context(np.zeros(DUMMY_TOKENS, np.int32))
        rows = [TrainingRow(empty, version=0, on_policy=False, rollout=0, turns=np.zeros(DUMMY_TOKENS, np.int32))]
    for index, row in enumerate(rows):
        if row.tokens.sampled[0]:
            raise ValueError(f"row {index} has no prompt: its first response token would have no context")
    input_ids = _padded([row.tokens.ids for row in rows]).long()
    images = None if vision is None else vision.inputs([row.images for row in rows], input_ids.shape[1], shared)
    experts = _padded_experts(rows)
    if trees is not None:
        # A token's experts belong to the pass that reads the token before it.
        experts = None if experts is None else trees.of_tokens(experts.roll(-1, dims=1))
        images = None if images is None else images.arranged(trees.of_tokens)
    return PaddedRows(
        input_ids=input_ids,
        response_mask=_padded([row.tokens.sampled for row in rows]),
        behaviour_logprobs=_padded([row.tokens.logprobs for row in rows]),
        on_policy=_padded([row.on_policy & (row.tokens.versions == row.version) for row in rows]),
        rollouts=torch.tensor([row.rollout for row in rows]),
        turns=_padded([row.turns for row in rows]).long(),
        experts=experts,
        images=images,
        trees=trees,
    )


def _padded(arrays: Sequence[NDArray[Any]]) -> Tensor:
    """Join arrays [tokens, ...] to a tensor [rows, T, ...], with zeros after a row's end."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(array) for array in arrays], batch_first=True)


def _padded_experts(rows: Sequence[TrainingRow]) -> Tensor | None:
    recorded = join_experts((len(row), row.tokens.experts) for row in rows)
    if recorded is None:
        return None
    if recorded.dtype != np.uint8:
        recorded = recorded.astype(np.int32)  # torch supports few operations on uint16
    return _padded(np.split(recorded, np.cumsum([len(row) for row in rows])[:-1]))  # 0 is ``UNKNOWN``
