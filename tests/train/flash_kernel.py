"""Flash attention's kernel for packed rows, computed by sdpa on a CPU. transformers' own code around it runs as is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

LONGEST: list[int] = []
"""The longest row of each call of the kernel."""


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (2**30, 2**30),
) -> Tensor:
    """Attention within each row; ``q``, ``k``, ``v``: [tokens, heads, head size]."""
    assert causal and cu_seqlens_q.dtype == torch.int32 and type(max_seqlen_q) is int
    assert cu_seqlens_q.equal(cu_seqlens_k) and max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
    LONGEST.append(max_seqlen_q)
    rows = []
    for start, end in pairwise(cu_seqlens_q.tolist()):
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        row = [part[start:end].transpose(0, 1)[None] for part in (q, k, v)]
        seen = (distance >= 0) & (distance <= window_size[0])
        attended = torch.nn.functional.scaled_dot_product_attention(
            *row, attn_mask=seen, scale=softmax_scale, enable_gqa=True
        )
        rows.append(attended[0].transpose(0, 1))
    assert end == len(q)
    return torch.cat(rows)


def install(setattr: Any = setattr) -> None:
    """Give transformers this kernel. To look for rows in the positions, which waits for a GPU, becomes an error."""
    from transformers import modeling_flash_attention_utils as flash

    def search(*_: object) -> bool:
        raise AssertionError("transformers searches the positions for packed rows")

    kernels = (
        (None, flash_attn_varlen_func, None, None, None),
        (
            flash._lazy_define_process_function(flash_attn_varlen_func),
            None,
        ),
    )
    setattr(flash, "lazy_import_flash_attention", lambda *_: kernels)
    setattr(flash, "_is_packed_sequence", search)
