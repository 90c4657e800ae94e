"""Attention on GPUs that repeats its bits, which a replay and a resume need (decision 0019).

By default some of torch's kernels for attention (`sdpa`) add up gradients in any order: with a mask, as shared prefixes
have, and in bfloat16 for long rows. torch's deterministic mode fixes the order. But the mode refuses other operations
of some models (a cumulative sum, for example), so it is on only around attention, in both passes. With ``warn_only``
attention would ignore it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from asyncrl_cli.train.model.varlen_attention import attend_to_rows

Attention = Callable[..., tuple[Tensor, Any]]
"""An attention function of transformers."""
ENVIRONMENT = {"FLASH_ATTENTION_DETERMINISTIC": "1"}
"""transformers passes it on to flash attention."""


@cache
def install() -> None:
    """Make `sdpa` of all transformers models in this process repeatable, and add `varlen`. Further calls do nothing: by
    then sequence parallelism may have put its exchange around them."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Otherwise the mode also fills every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = partial(attend, ALL_ATTENTION_FUNCTIONS["sdpa"])
    # Without a mask function: transformers then makes no mask, and does not search for packed rows, which would wait.
    ALL_ATTENTION_FUNCTIONS["varlen"] = partial(attend, attend_to_rows)


def attend(
    attention: Attention,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *arguments: Any,
    **keywords: Any,
) -> tuple[Tensor, Any]:
    """Call ``attention`` in deterministic mode, now and in the backward pass. transformers passes the arguments."""
    query, key, value = _SetMode.apply(False, query, key, value)  # type: ignore[no-untyped-call]
    set_mode(True)
    try:
        output, weights = attention(module, query, key, value, *arguments, **keywords)
    finally:
        set_mode(False)
    (output,) = _SetMode.apply(True, output)  # type: ignore[no-untyped-call]
    return output, weights


def set_mode(on: bool) -> None:
    """Switch torch's deterministic mode for the whole process."""
    # Not ``use_deterministic_algorithms``, which imports torch's compiler.
    torch.set_deterministic_debug_mode("error" if on else "default")


class _SetMode(torch.autograd.Function):
    """Passes tensors on, and sets the mode when the backward pass comes here.

    Query, key and value pass together. With a hook for each, other operations would run before the last one.
    """

    @staticmethod
    def forward(ctx: Any, on: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.on = on
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        set_mode(ctx.on)
        return None, *gradients
