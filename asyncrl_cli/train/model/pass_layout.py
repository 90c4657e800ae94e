"""Which positions a pass computes, and which of them predict a token that counts, as indices made on the CPU.

Indexing by a mask makes the host wait until the GPU has counted it, at the moment when it should prepare the next
operations. So a micro-batch brings indices, and nothing in a pass looks for positions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from asyncrl_cli.spec.sections import needs_no_mask
from asyncrl_cli.train.model.sequence_parallel import SequenceGroup
from asyncrl_cli.train.prefix_trees import TreeLayout


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Rows joined in one sequence, each up to its last position that predicts a token that counts."""

    source: Tensor  # int64, [P]: a position's token in a matrix [rows, tokens], flattened
    positions: Tensor  # int64, [1, P]: each position in its row
    starts: Tensor  # int32, [rows + 1]: where rows begin, and P; as flash attention wants it
    longest_row: int  # number of its positions

    def of_tokens(self, matrix: Tensor, shift: int = 0) -> Tensor:
        """Pick from [rows, tokens, ...] the position's token, or the token ``shift`` later: [1, P, ...]."""
        return matrix.flatten(0, 1).index_select(0, self.source + shift)[None]

    def attention_arguments(self, backbone: Any) -> dict[str, Any]:
        """Return arguments with which attention keeps rows apart; empty if it has a mask for this.

        Without them transformers searches for the rows in every layer, and each time the host waits for the GPU.
        ``backbone``: a transformers model.
        """
        if not needs_no_mask(backbone.config.get_text_config()._attn_implementation):
            return {}
        starts, longest_row = self.starts, self.longest_row
        return {
            "cu_seq_lens_q": starts,
            "cu_seq_lens_k": starts,
            "max_length_q": longest_row,
            "max_length_k": longest_row,
        }


@dataclass(frozen=True, slots=True, eq=False)
class PassLayout:
    """The positions of a pass over rows [rows, tokens] with n tokens that count, row by row."""

    scored: Tensor  # int64, [n]: the tokens, in the flattened matrix
    predicting: Tensor  # int64, [n]: the position before each, among the pass's positions, flattened
    packed: PackedRows | None = None  # None: all positions but each row's last, or the positions of trees
    local: Tensor | None = None  # int64, [m]: tokens that this rank's slice predicts; ``predicting`` is then [m]

    @classmethod
    def of(
        cls,
        response_mask: Tensor,
        packing: bool,
        trees: TreeLayout | None = None,
        sequence: SequenceGroup | None = None,
    ) -> PassLayout:
        """Make the layout on the CPU. ``response_mask``: bool, [rows, tokens], on the CPU, false in column 0.
        ``sequence``: the ranks that have a slice of the rows each; None: this rank has them alone."""
        rows, tokens = response_mask.shape
        scored = response_mask.flatten().nonzero()[:, 0]
        row, column = scored // tokens, scored % tokens - 1
        if trees is not None:
            return cls(scored, trees.slots.flatten().index_select(0, row * (tokens - 1) + column))
        width, packed = tokens - 1, None
        if packing:
            lengths = torch.ones(rows, dtype=torch.int64).scatter_reduce(0, row, column + 1, "amax")
            starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
            positions = torch.arange(width).expand(rows, width)
            is_packed = positions < lengths[:, None]
            source = (torch.arange(rows)[:, None] * tokens + positions)[is_packed]
            row, column, width = torch.zeros_like(row), starts[row] + column, int(starts[-1])
            if sequence is not None:  # slices of equal length: the last row is extended
                padding = -width % sequence.size
                lengths[-1] += padding
                starts[-1] += padding
            packed = PackedRows(source, positions[is_packed][None], starts.int(), int(lengths.max()))
        if sequence is None:
            return cls(scored, row * width + column, packed)
        slice_length = -(-width // sequence.size)
        local = (column // slice_length == sequence.rank).nonzero()[:, 0]
        return cls(scored, (row * slice_length + column % slice_length)[local], packed, local)


Record = TypeVar("Record")


def moved(value: Record, device: torch.device | str) -> Record:
    """Copy a tensor from the CPU to a device, or all tensors in a dataclass or a dictionary.

    To a GPU from pinned memory: the host does not wait for the copy.
    """
    record: Any = value
    if isinstance(record, Tensor) and torch.device(device).type == "cuda":
        record = record.pin_memory().to(device, non_blocking=True)
    elif isinstance(record, Tensor):
        record = record.to(device)
    elif isinstance(record, dict):
        record = {name: moved(item, device) for name, item in record.items()}
    elif is_dataclass(value):
        record = replace(record, **{field.name: moved(getattr(record, field.name), device) for field in fields(record)})
    copied: Record = record
    return copied
