"""Shared prefixes: positions that several rows have in common go through the model once (`trainer.share_prefixes`).

A group's rollouts begin with the same prompt, and the branches of an agent's rollout with the same conversation. Under
causal attention a position's state depends only on the tokens up to it. Rows with a common prefix therefore form a
tree: each position of the tree is computed once, at its depth, and sees its ancestors. Every row then reads the states
on its own path, and everything after that (log-probs, losses) works on rows again.

A tree's positions are in the order of its rows: each row continues the path of the row before it. The descendants of a
position are then the positions up to an end: i sees j exactly if j <= i < ends[j].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl_cli.spec.sections import TrainerSpec, why_rows_are_separate

Keys = NDArray[Any]
"""[positions], of any dtype. Two rows with equal keys up to a position have equal states there."""

MASK_POSITIONS = 2**14
"""Most positions of a tree with several rows: its mask of all pairs has 2^28 numbers, 1 GiB in float32."""

LEAST_SAVED = 0.2
"""Share of all positions that trees must save. Even one tree gives its whole micro-batch a mask, which slows attention:
a small model gains nothing from trees that save a fifth (docs/performance.md)."""

LEAST_SAVED_OF_PACKED = 1 / 3
"""Share of the computed cost of packed rows that trees must save. Trees are padded, which takes up to 1.4 times the
positions and which the computed cost leaves out."""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Rows that are computed together, in the order of their keys."""

    rows: tuple[int, ...]
    """Indices of the rows."""
    lengths: tuple[int, ...]
    """Positions of each row: all its tokens except the last, which predicts nothing."""
    shared: tuple[int, ...]
    """Number of first positions that each row shares with the row before it; 0 for the first row."""

    @property
    def positions(self) -> int:
        """Number of positions that the model computes."""
        return sum(self.lengths) - sum(self.shared)

    def __len__(self) -> int:
        """Size in tokens, comparable with a row's length: a tree of one row has the size of that row."""
        return self.positions + 1


def single_rows(lengths: Sequence[int]) -> list[PrefixTree]:
    """Make a tree for each row, of ``lengths`` tokens: nothing is shared."""
    return [PrefixTree((row,), (length - 1,), (0,)) for row, length in enumerate(lengths)]


def why_separate(trainer: TrainerSpec, config: Any, bidirectional: bool = False) -> str | None:
    """Return why rows of a model with this config cannot share prefixes; None if they can.

    ``bidirectional``: placeholders of an image see each other.
    """
    if (setting := why_rows_are_separate(trainer)) is not None:
        return f"{setting} excludes it"
    if windows_of(config.get_text_config()) is None:
        return f"{config.model_type} has layers that are not attention over all earlier positions or a window of them"
    return "the tokens of an image see each other" if bidirectional else None


def trees_of_update(keys: Sequence[Keys], trainer: TrainerSpec, tokens: int, config: Any) -> list[PrefixTree]:
    """Group an update's rows, with these keys, into trees for a model with this config, in micro-batches of ``tokens``.
    Depends on nothing else, so all ranks and a replay choose the same."""
    on_gpu = trainer.gpus_per_rank > 0
    return plan_trees(
        keys,
        max_positions=min(tokens - 1, MASK_POSITIONS),
        pair_cost=cost_of_pair(config, on_gpu),
        ranks=trainer.ranks // trainer.sequence_parallel,
        packed_pair_cost=cost_of_pair(config, on_gpu, masked=False) if trainer.attention == "varlen" else None,
    )


def plan_trees(
    keys: Sequence[Keys], max_positions: int, pair_cost: float, ranks: int = 1, packed_pair_cost: float | None = None
) -> list[PrefixTree]:
    """Group all rows with these keys into trees that are cheap to compute; every row is in exactly one tree.

    Rows are sorted by their keys, so a row shares its longest prefix with the row before it. It joins that row's tree
    if this saves more than it costs. It saves the shared positions, and costs attention, which is computed for all
    pairs of a tree's positions but only for half of a single row's. If all trees together save little, every row stays
    alone. A tree has at most ``max_positions`` positions, unless it is one row. Several ranks get smaller trees if the
    busiest rank then has fewer positions.

    ``pair_cost``: see ``cost_of_pair``. ``packed_pair_cost``: a pair's cost in rows that are packed and need no mask;
    None: without trees, rows are attended to as trees are.
    """
    if not keys:  # a step without rows: the rewards in each group are equal, for example
        return []
    order = sorted(range(len(keys)), key=lambda row: (keys[row].tobytes(), row))
    common = [0, *(_common(keys[earlier], keys[later]) for earlier, later in pairwise(order))]
    lengths = [len(keys[row]) for row in order]
    row_share = 1.0 if packed_pair_cost is None else packed_pair_cost / pair_cost

    def cut(max_positions: int) -> list[PrefixTree]:
        starts: list[int] = []
        size = 0
        for index, (length, shared) in enumerate(zip(lengths, common, strict=True)):
            added = length - shared
            saved = shared + pair_cost * (row_share * length**2 / 2 - (2 * size + added) * added)
            if index and shared and saved > 0 and size + added <= max_positions:
                size += added
            else:
                starts.append(index)
                size = length
        return [
            PrefixTree(tuple(order[begin:end]), lengths=tuple(lengths[begin:end]), shared=(0, *common[begin + 1 : end]))
            for begin, end in zip(starts, [*starts[1:], len(order)], strict=True)
        ]

    best = cut(max_positions)
    limit = max(tree.positions for tree in best)
    while ranks > 1 and limit > 1:
        limit = limit * 9 // 10
        smaller = cut(min(limit, max_positions))
        if _busiest(smaller, ranks) < _busiest(best, ranks):
            best = smaller
    if packed_pair_cost is None:
        is_worthwhile = sum(sum(tree.shared) for tree in best) >= LEAST_SAVED * sum(lengths)
    else:
        rows_cost = sum(length + packed_pair_cost * length**2 / 2 for length in lengths)
        trees_cost = sum(tree.positions + pair_cost * tree.positions**2 for tree in best)
        is_worthwhile = trees_cost <= (1 - LEAST_SAVED_OF_PACKED) * rows_cost
    return best if is_worthwhile else single_rows([len(row) + 1 for row in keys])


def cost_of_pair(config: Any, on_gpu: bool = False, masked: bool = True) -> float:
    """Return the cost of a pair of positions in attention, relative to a position in all other operations of a layer.

    A position takes about 12 · width² multiplications with weights, and a pair 2 · width. A pair's multiplications come
    with its softmax, and take about twice as long: also in a GPU's flash attention. With a mask (``masked``) they take
    about four times as long there. On a GPU the width of a pair is the heads' width, which may be above the model's.
    """
    text = config.get_text_config()
    width: int = text.hidden_size
    if not on_gpu:
        return 1 / (3 * width)
    heads: int = text.num_attention_heads
    heads_width: int = heads * (getattr(text, "head_dim", None) or width // heads)
    return (4 if masked else 2) * 2 * heads_width / (12 * width**2)


def _common(keys: Keys, next_keys: Keys) -> int:
    shorter_length = min(len(keys), len(next_keys))
    differ = np.flatnonzero(keys[:shorter_length] != next_keys[:shorter_length])
    return int(differ[0]) if differ.size else shorter_length


def divided(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide indices among ranks: from the largest size to the smallest, each to the rank with the least so far (R. L.
    Graham's LPT rule, 1969). Two ranks differ by at most the largest size."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += sizes[index]
    return shares


def _busiest(trees: Sequence[PrefixTree], ranks: int) -> int:
    sizes = [tree.positions for tree in trees]
    return max(sum(sizes[index] for index in share) for share in divided(sizes, ranks))


@dataclass(frozen=True, slots=True, eq=False)
class TreeLayout:
    """A micro-batch's trees as a model's input: [trees, S] with the largest tree's size S, or [1, S] with all trees
    joined. The micro-batch's rows have T tokens, and are numbered in the order of the trees."""

    source: Tensor
    """int64, [trees, S]: location of a position's token, as row · T + column."""
    positions: Tensor
    """int64, [trees, S]: the position in its row, which is the depth in the tree."""
    ends: Tensor
    """int64, [trees, S]: the end of a position's descendants. After a tree's end a position sees only itself."""
    slots: Tensor
    """int64, [rows, T - 1]: location of a row position's state, as tree · S + index; 0 after a row's end."""

    @classmethod
    def of(cls, trees: Sequence[PrefixTree], tokens: int, joined: bool) -> TreeLayout:
        """Lay out rows of ``tokens`` tokens, on the CPU. ``joined``: all trees are in one sequence."""
        sizes = [tree.positions for tree in trees]
        shape = (1, sum(sizes)) if joined else (len(trees), max(sizes))
        # After a tree's end: a row's last token, which never belongs to an image.
        source, positions = np.full(shape, tokens - 1), np.zeros(shape, np.int64)
        ends = np.tile(np.arange(1, shape[1] + 1), (shape[0], 1))
        slots = np.zeros((sum(len(tree.rows) for tree in trees), tokens - 1), np.int64)
        row = begin = 0
        for index, tree in enumerate(trees):
            line, start = (0, begin) if joined else (index, 0)
            path: NDArray[np.int64] = np.zeros(0, np.int64)
            end = start
            for length, shared in zip(tree.lengths, tree.shared, strict=True):
                added = np.arange(end, end + length - shared)
                end += length - shared
                path = np.concatenate([path[:shared], added])
                ends[line, path] = end  # provisional: a later row that shares the path moves it
                source[line, added] = row * tokens + np.arange(shared, length)
                positions[line, added] = np.arange(shared, length)
                slots[row, :length] = line * shape[1] + path
                row += 1
            begin += sizes[index]
        return cls(*(torch.from_numpy(array) for array in (source, positions, ends, slots)))

    def of_tokens(self, matrix: Tensor) -> Tensor:
        """Gather [rows, T, ...] by token into [trees, S, ...] by position."""
        return matrix.flatten(0, 1)[self.source]

    def masks(self, config: Any, dtype: torch.dtype) -> Any:
        """Return the ``attention_mask`` for a transformers model with this config: one, or one for each kind of layer.

        A mask is [trees, 1, S, S], with 0 where a position is seen, else -inf.
        """
        text = config.get_text_config()
        windows = windows_of(text)
        assert windows is not None
        masks = {layer_type: self._mask(window, dtype) for layer_type, window in windows.items()}
        return masks if hasattr(text, "layer_types") else masks.popitem()[1]

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        index = torch.arange(self.ends.shape[1], device=self.ends.device)
        visible = (index <= index[:, None]) & (index[:, None] < self.ends[:, None, :])
        if window is not None:
            visible &= self.positions[:, :, None] - self.positions[:, None, :] < window
        # In the states' dtype: a bool mask would be converted in every layer.
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)[
            :, None
        ]


def windows_of(text: Any) -> dict[str, int | None] | None:
    """Map each kind of a text model's attention layers to its window in positions; None: no window.

    ``text`` is a transformers config. Returns None for a model with layers that are not attention, or see chunks.
    """
    window = getattr(text, "sliding_window", None)
    window_by_type = {"full_attention": None, "sliding_attention": window}
    if (layer_types := getattr(text, "layer_types", None)) is not None:
        return (
            {layer_type: window_by_type[layer_type] for layer_type in layer_types}
            if window_by_type.keys() >= set(layer_types)
            else None
        )
    if getattr(text, "attention_chunk_size", None) is not None:
        return None
    return {"": window}
