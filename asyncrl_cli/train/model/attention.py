"""Attention on GPUs: packed rows without masks, and the same bits in every pass (decision 0019).

``varlen`` is torch's own FlashAttention kernel. It gets the rows' boundaries, so each row attends only to itself and no
mask is built. Shared prefixes need masks; a layer that gets a mask attends with `sdpa`, and so do the layers of a
vision tower, which are not causal.

A replay and a resume need the same bits. By default some of torch's kernels for attention add up gradients in any
order: with a mask, and in bfloat16 for long rows. torch's deterministic mode fixes the order. But the mode refuses
other operations of some models (a cumulative sum, for example), so it is on only around attention, in both passes. With
``warn_only`` attention would ignore it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.train.prefix_trees import windows_of

Attention = Callable[..., tuple[Tensor, Any]]
"""An attention function of transformers."""
ENVIRONMENT = {"FLASH_ATTENTION_DETERMINISTIC": "1"}
"""transformers passes it on to flash attention."""
MAX_HEAD_SIZE, HEAD_SIZE_STEP = 256, 8
"""Sizes of a head that the kernel takes: multiples of the step up to the maximum (torch's flash_api.cpp)."""


def why_not_varlen(model: Any, bidirectional: bool) -> str | None:
    """Return why the kernel cannot compute this transformers model's attention; None if it can.

    ``bidirectional``: engines let the placeholders of an image see each other, if the model was made for it.
    """
    text = model.config.get_text_config()
    name = model.config.model_type
    if windows_of(text) is None:
        return f"{name} has layers that are not attention over all earlier positions or a window of them"
    if getattr(text, "attn_logit_softcapping", None) is not None:
        return f"{name} caps the scores of attention"
    if any(weight_name.endswith("sinks") for weight_name, _ in model.named_parameters()):
        return f"the attention of {name} has sinks"
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    sizes = {head_size, *(getattr(text, key, None) or head_size for key in ("global_head_dim", "v_head_dim"))}
    if getattr(text, "qk_nope_head_dim", None):  # latent attention: a key has a part with and a part without positions
        sizes = {text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim}
        if len(sizes) > 1:
            return f"values of {name} have another size than its keys"
    if refused_sizes := sorted(size for size in sizes if size > MAX_HEAD_SIZE or size % HEAD_SIZE_STEP):
        return (
            f"a head of {name} has the size {refused_sizes[0]}, and the kernel takes multiples of {HEAD_SIZE_STEP} up "
            f"to {MAX_HEAD_SIZE}"
        )
    if bidirectional and sees_images_both_ways(model.base_model):
        return f"the tokens of an image see each other in a {name}"
    return None


def sees_images_both_ways(backbone: Any) -> bool:
    """True if the model can let an image's placeholders see each other."""
    return "token_type_ids" in inspect.signature(backbone.forward).parameters


def attend_to_rows(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attend within rows: an attention function of transformers.

    ``query``, ``key``, ``value``: [rows, heads, tokens, head size]; result: [rows, tokens, heads, head size].
    ``cu_seq_lens_q``: int32, the starts of packed rows, and the end; ``max_length_q``: positions of the longest row.
    None: no row is packed. ``sliding_window``: how many positions a position sees, itself included. Raises
    ``ConfigError`` for attention with sinks or capped scores, which the kernel would leave out.
    """
    from torch.nn.attention.varlen import varlen_attn
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if attention_mask is not None or not is_causal:
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **keywords
        )
        return attended, None
    if any(keywords.get(name) is not None for name in ("s_aux", "softcap", "position_bias")):
        raise ConfigError(
            "attention of this model has sinks, capped scores or a bias, which varlen cannot compute",
            location="trainer.attention",
            hint="use sdpa",
        )
    rows, heads, tokens, size = query.shape
    if cu_seq_lens_q is None or max_length_q is None:
        max_length_q = tokens
        cu_seq_lens_q = torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=query.device)
    attended = varlen_attn(
        query.transpose(1, 2).flatten(0, 1),
        key.transpose(1, 2).flatten(0, 1),
        value.transpose(1, 2).flatten(0, 1),
        cu_seq_q=cu_seq_lens_q,
        cu_seq_k=cu_seq_lens_q,
        max_q=max_length_q,
        max_k=max_length_q,
        scale=scaling,
        # The kernel counts the earlier positions. 0 later ones make it causal.
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=heads != key.shape[1],
    )
    assert isinstance(attended, Tensor)
    return attended.view(rows, tokens, heads, size), None


@cache
def install_attention() -> None:
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
