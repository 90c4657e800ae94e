"""torch's flash attention kernel for packed rows, computed on a CPU. torch's own `varlen_attn`, with its gradient's
formula, runs as is around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from asyncrl_cli.train.model import attention

LONGEST: list[int] = []
"""The longest row of each forward call of the kernel."""


def _probabilities(
    query: Tensor, key: Tensor, edges: Tensor, longest: int, scale: float | None, left: int
) -> Iterator[tuple[slice, Tensor, float]]:
    """Each row's place and softmax, float [heads, tokens, tokens]; ``query``, ``key``: [tokens, heads, head size]."""
    assert edges.dtype == torch.int32 and type(longest) is int and longest == edges.diff().max()
    assert edges[-1] == len(query) == len(key)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    for start, end in pairwise(edges.tolist()):
        row = slice(start, end)
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = (distance >= 0) & ((distance <= left) | (left < 0))
        scores = torch.einsum("qhd,khd->hqk", query[row], key[row]) * scale
        yield row, scores.masked_fill(~seen, -torch.inf).softmax(-1), scale


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int = -1,
    window_size_right: int = -1,
    **unused: Any,
) -> tuple[Tensor, ...]:
    assert cum_seq_q.equal(cum_seq_k) and max_q == max_k and window_size_right == 0 and not dropout_p
    LONGEST.append(max_q)
    output = torch.empty_like(query)
    values = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    for row, weights, _ in _probabilities(query, key, cum_seq_q, max_q, scale, window_size_left):
        output[row] = torch.einsum("hqk,khd->qhd", weights, values[row])
    unread = torch.zeros(query.shape[1], len(query))
    return output, unread, unread, unread, unread


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    shares = query.shape[1] // key.shape[1]
    keys, values = (states.repeat_interleave(shares, 1) for states in (key, value))
    gradients = [torch.empty_like(query) for _ in range(3)]
    for row, weights, factor in _probabilities(query, key, cum_seq_q, max_q, scale, window_size_left):
        of_weights = torch.einsum("qhd,khd->hqk", grad_out[row], values[row])
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * factor
        gradients[0][row] = torch.einsum("hqk,khd->qhd", of_scores, keys[row])
        gradients[1][row] = torch.einsum("hqk,qhd->khd", of_scores, query[row])
        gradients[2][row] = torch.einsum("hqk,qhd->khd", weights, grad_out[row])
    of_query, *of_heads = gradients
    of_key, of_value = (gradient.unflatten(1, (-1, shares)).sum(2) for gradient in of_heads)
    return of_query, of_key, of_value


@contextmanager
def installed() -> Iterator[None]:
    """Inside the block torch has this kernel for CPUs, and transformers has `varlen` and repeatable `sdpa`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa, fills = ALL_ATTENTION_FUNCTIONS["sdpa"], torch.utils.deterministic.fill_uninitialized_memory
    attention.install_attention()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    LONGEST.clear()
    try:
        yield
    finally:
        library._destroy()
        ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        attention.install_attention.cache_clear()
