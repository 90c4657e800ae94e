"""Shared prefixes: positions that rows have in common go through the model once (`trainer.share_prefixes`).

The rollouts of a group begin with the same prompt, and the branches of an agent's rollout with the same conversation.
Under causal attention the state of a position depends on the tokens up to it alone. Rows with a common prefix
therefore become a tree: each position of the tree is computed once, at its depth, and sees its ancestors. Every row
then reads the states of its own path, and all that follows (log-probs, losses) is about rows again.

A tree's positions are in the order of its rows: each row continues the path of the row before it. The descendants of a
position are then the positions up to an end: i sees j exactly if j <= i < ends[j].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl_cli.spec.sections import TrainerSpec, why_rows_are_separate

Keys = NDArray[Any]
"""Equal keys at a position, after equal keys at all earlier ones, mean equal states; [positions], of any dtype."""

MASK_POSITIONS = 2**14
"""Most positions of a tree, unless it is one row: a mask of all pairs then has 2^28 numbers, 1 GiB in float32."""

LEAST_SAVED = 0.2
"""Share of all positions that trees must save. A single tree gives its whole micro-batch a mask, with which attention
is slower: a small model gains nothing from trees that save a fifth (docs/performance.md)."""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Rows that are computed together, in the order of their keys."""

    rows: tuple[int, ...]
    """Indices of the rows."""
    lengths: tuple[int, ...]
    """Positions of each row: its tokens without the last, from which nothing is predicted."""
    shared: tuple[int, ...]
    """The first positions of each row that are those of the row before it; 0 for the first row."""

    @property
    def positions(self) -> int:
        """Positions that the model computes."""
        return sum(self.lengths) - sum(self.shared)

    def __len__(self) -> int:
        """The size in tokens: of a tree with one row all tokens of that row."""
        return self.positions + 1


def single_rows(lengths: Sequence[int]) -> list[PrefixTree]:
    """A tree for each row of so many tokens: nothing is shared."""
    return [PrefixTree((row,), (length - 1,), (0,)) for row, length in enumerate(lengths)]


def why_separate(trainer: TrainerSpec, config: Any, bidirectional: bool = False) -> str | None:
    """Why rows of a model with this config cannot share prefixes; None if they can.

    ``bidirectional``: placeholders of an image see each other.
    """
    if (setting := why_rows_are_separate(trainer)) is not None:
        return f"{setting} excludes it"
    if windows_of(config.get_text_config()) is None:
        return f"{config.model_type} has layers that are not attention over all earlier positions or a window of them"
    return "the tokens of an image see each other" if bidirectional else None


def plan_trees(keys: Sequence[Keys], most: int, pair_cost: float, ranks: int = 1) -> list[PrefixTree]:
    """Trees of all rows with these keys, so that computing them costs little; every row is in exactly one.

    Rows are sorted by their keys: the longest prefix that a row shares with any earlier row is the one that it shares
    with the row before it. A row joins the tree of the row before it if that saves more than it costs. It saves the
    shared positions. It costs attention: a tree's is computed for all pairs of positions, and a single row's for half
    of them. If all trees together save little, every row stays alone. A tree has at most ``most`` positions, unless it
    is one row. Several ranks get smaller trees where the busiest of them then has fewer positions.

    ``pair_cost``: the cost of a pair of positions in attention, in costs of a position in all other operations.
    """
    if not keys:  # a step without rows, such as one with equal rewards in each group
        return []
    order = sorted(range(len(keys)), key=lambda row: (keys[row].tobytes(), row))
    common = [0, *(_common(keys[earlier], keys[later]) for earlier, later in pairwise(order))]
    lengths = [len(keys[row]) for row in order]

    def cut(most: int) -> list[PrefixTree]:
        starts: list[int] = []
        size = 0
        for index, (length, shared) in enumerate(zip(lengths, common, strict=True)):
            new = length - shared
            saved = shared + pair_cost * (length**2 / 2 - (2 * size + new) * new)
            if index and shared and saved > 0 and size + new <= most:
                size += new
            else:
                starts.append(index)
                size = length
        return [
            PrefixTree(tuple(order[begin:end]), lengths=tuple(lengths[begin:end]), shared=(0, *common[begin + 1 : end]))
            for begin, end in zip(starts, [*starts[1:], len(order)], strict=True)
        ]

    best = cut(most)
    limit = max(tree.positions for tree in best)
    while ranks > 1 and limit > 1:
        limit = limit * 9 // 10
        smaller = cut(min(limit, most))
        if _busiest(smaller, ranks) < _busiest(best, ranks):
            best = smaller
    saved = sum(sum(tree.shared) for tree in best)
    return best if saved >= LEAST_SAVED * sum(lengths) else single_rows([len(row) + 1 for row in keys])


def cost_of_pair(config: Any) -> float:
    """The cost of a pair of positions in attention, in costs of a position in all other operations of a layer.

    A position takes about 12 · width² multiplications with weights, and a pair 2 · width; a multiplication of a pair
    comes with the softmax of the pair, and takes about twice as long.
    """
    width: int = config.get_text_config().hidden_size
    return 1 / (3 * width)


def _common(first: Keys, second: Keys) -> int:
    """Leading keys that both have."""
    most = min(len(first), len(second))
    differ = np.flatnonzero(first[:most] != second[:most])
    return int(differ[0]) if differ.size else most


def divided(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The indices that each rank gets: from the largest to the smallest, each to the rank with the least so far (R. L.
    Graham's LPT rule, 1969), so two ranks differ by at most one largest size."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        rank = loads.index(min(loads))
        parts[rank].append(index)
        loads[rank] += sizes[index]
    return parts


def _busiest(trees: Sequence[PrefixTree], ranks: int) -> int:
    """Positions of the rank with the most."""
    sizes = [tree.positions for tree in trees]
    return max(sum(sizes[index] for index in part) for part in divided(sizes, ranks))


@dataclass(frozen=True, slots=True, eq=False)
class TreeLayout:
    """The trees of a micro-batch as a model's input, [trees, S], where S is the largest tree; or [1, S] of all trees,
    joined. Rows of the micro-batch have T tokens, and are numbered in the order of the trees."""

    source: Tensor
    """int64, [trees, S]: where a position's token is, as row · T + column."""
    positions: Tensor
    """int64, [trees, S]: the position in its row, which is the depth in the tree."""
    ends: Tensor
    """int64, [trees, S]: the end of a position's descendants. After a tree's end a position sees itself alone."""
    slots: Tensor
    """int64, [rows, T - 1]: where the state of a row's position is, as tree · S + index; 0 after a row's end."""

    @classmethod
    def of(cls, trees: Sequence[PrefixTree], tokens: int, joined: bool) -> TreeLayout:
        """The layout for rows of ``tokens`` tokens, on the CPU. ``joined``: all trees are in one sequence."""
        sizes = [tree.positions for tree in trees]
        shape = (1, sum(sizes)) if joined else (len(trees), max(sizes))
        # After a tree's end the last token of a row, which is never an image's.
        source, positions = np.full(shape, tokens - 1), np.zeros(shape, np.int64)
        ends = np.tile(np.arange(1, shape[1] + 1), (shape[0], 1))
        slots = np.zeros((sum(len(tree.rows) for tree in trees), tokens - 1), np.int64)
        row = begin = 0
        for index, tree in enumerate(trees):
            at, first = (0, begin) if joined else (index, 0)
            path: NDArray[np.int64] = np.zeros(0, np.int64)
            end = first
            for length, shared in zip(tree.lengths, tree.shared, strict=True):
                added = np.arange(end, end + length - shared)
                end += length - shared
                path = np.concatenate([path[:shared], added])
                ends[at, path] = end  # of an ancestor: for now, until a later row shares it
                source[at, added] = row * tokens + np.arange(shared, length)
                positions[at, added] = np.arange(shared, length)
                slots[row, :length] = at * shape[1] + path
                row += 1
            begin += sizes[index]
        return cls(*(torch.from_numpy(array) for array in (source, positions, ends, slots)))

    def to(self, device: torch.device | str) -> TreeLayout:
        """The same on another device."""
        return TreeLayout(*(getattr(self, field.name).to(device) for field in fields(self)))

    def of_tokens(self, matrix: Tensor) -> Tensor:
        """[rows, T, ...] by token to [trees, S, ...] by position of the trees."""
        return matrix.flatten(0, 1)[self.source]

    def of_rows(self, states: Tensor, where: Tensor) -> Tensor:
        """States of trees, [trees, S, width], to the rows' positions under ``where``, bool [rows, T - 1]: [positions,
        width]."""
        # Not by indexing: on a CPU its backward pass adds up the gradients of a shared position in no fixed order.
        return torch.nn.functional.embedding(self.slots[where], states.flatten(0, 1))

    def masks(self, config: Any, dtype: torch.dtype) -> Any:
        """What a transformers model with this config takes as ``attention_mask``: one, or one for each kind of layer.

        With flex attention it is a block mask, otherwise [trees, 1, S, S] with 0 where a position is seen, else -inf.
        """
        text = config.get_text_config()
        windows = windows_of(text)
        assert windows is not None
        if text._attn_implementation == "flex_attention":
            masks = {kind: self._block_mask(window) for kind, window in windows.items()}
        else:
            masks = {kind: self._mask(window, dtype) for kind, window in windows.items()}
        return masks if hasattr(text, "layer_types") else masks.popitem()[1]

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        index = torch.arange(self.ends.shape[1], device=self.ends.device)
        seen = (index <= index[:, None]) & (index[:, None] < self.ends[:, None, :])
        if window is not None:
            seen &= self.positions[:, :, None] - self.positions[:, None, :] < window
        # In the dtype of the states: a bool mask is converted in every layer.
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None]

    def _block_mask(self, window: int | None) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        ends, positions = self.ends, self.positions

        def seen(tree: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            found = (key <= query) & (query < ends[tree, key])
            return found if window is None else found & (positions[tree, query] - positions[tree, key] < window)

        trees, size = ends.shape
        # Compiled it does not make the mask of all pairs on its way to the mask of blocks.
        return create_block_mask(seen, trees, None, size, size, device=str(ends.device), _compile=ends.is_cuda)


def windows_of(text: Any) -> dict[str, int | None] | None:
    """The kinds of a text model's attention layers, each with how many positions back it sees; None: with no limit.

    ``text`` is a transformers config. Returns None for a model with layers that are not attention, or see chunks.
    """
    window = getattr(text, "sliding_window", None)
    known = {"full_attention": None, "sliding_attention": window}
    if (kinds := getattr(text, "layer_types", None)) is not None:
        return {kind: known[kind] for kind in kinds} if known.keys() >= set(kinds) else None
    if getattr(text, "attention_chunk_size", None) is not None:
        return None
    return {"": window}
