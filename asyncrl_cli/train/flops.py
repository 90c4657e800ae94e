"""Floating-point operations of training, and the rates of GPUs. Their ratio is the model FLOPs utilization, MFU (PaLM,
arXiv 2204.02311, appendix B).

A multiplication and an addition are two operations. We count matrix products, attention at the true lengths, and the
experts that a router chooses. We do not count padding and recomputed activations, which are not useful work, nor norms,
softmax, the optimizer, vision towers and the recurrence of linear attention, which are small. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

GPU_FLOPS = {
    "a100": 312e12,
    "h100": 989e12,
    "h100-pcie": 756e12,
    "h100-nvl": 835e12,
    "h200": 989e12,
    "h200-nvl": 835e12,
    "h20": 148e12,
    "b200": 2250e12,
    "l40s": 362e12,
    "rtx-4090": 165e12,
    "mi300x": 1307e12,
}
"""Dense operations per second in bfloat16, accumulated in float32, from the vendors' data sheets. A name without a form
factor is the fastest variant (SXM)."""


def peak_flops(name: str) -> float | None:
    """Find a GPU's rate by its driver's name, such as `NVIDIA H100 80GB HBM3`; None: unknown."""
    words = set(name.upper().replace("-", " ").split())
    matching_keys = [key for key in GPU_FLOPS if words.issuperset(key.upper().split("-"))]
    words_of_smaller_gpus = words & {"MIG", "LAPTOP", "D", "MAX", "VGPU"}  # slices, and smaller GPUs with the same name
    return None if not matching_keys or words_of_smaller_gpus else GPU_FLOPS[max(matching_keys, key=len)]


class Amounts(NamedTuple):
    """Amounts of work in passes, or the operations per unit of each amount. A shared computation counts once."""

    tokens: float = 0.0  # in the language model's layers
    predicted: float = 0.0  # tokens in the output head
    pairs: float = 0.0  # a query and a visible key, in every layer with full attention
    window_pairs: float = 0.0  # the same in layers with a sliding window

    def times(self, rates: Amounts) -> float:
        """Return the operations: one of the two has amounts, the other one operations per unit."""
        return sum(amount * rate for amount, rate in zip(self, rates, strict=True))


def causal_pairs(length: int, window: int = 0) -> int:
    """Number of pairs of a query and a visible key: itself and earlier ones, at most ``window`` (0: all)."""
    within = min(length, window or length)
    return within * (within + 1) // 2 + (length - within) * within


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """The operations of a model's passes, per unit of each of ``Amounts``."""

    forward: Amounts
    update: Amounts  # forward and backward
    window: int = 0  # tokens visible to layers with a sliding window

    @classmethod
    def of(cls, model: Any) -> ModelFlops:
        """Count for a transformers model with its adapters, with or without head; ZeRO-3 may have sharded it.

        A weight with at least two dimensions that is not an embedding multiplies every token. A backward pass takes as
        much as a forward pass for the inputs, and as much again for the trained weights.
        """
        from torch import nn

        from asyncrl_cli.train.model.images import PROJECTORS, TOWERS

        text = model.config.get_text_config()
        embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
        head = getattr(model.get_output_embeddings(), "weight", None)
        used, trained = (dict.fromkeys(Amounts._fields, 0.0) for _ in range(2))
        share = expert_share(text)
        for name, weight in model.named_parameters():
            shape = getattr(weight, "ds_shape", weight.shape)
            if len(shape) < 2 or name.endswith("bias") or (weight in embeddings and weight is not head):
                continue
            if any(module in name for module in (*PROJECTORS, *TOWERS)):
                continue
            amount_name = "predicted" if weight is head else "tokens"
            weight_count = prod(shape) * (share if ".experts." in name else 1.0)
            used[amount_name] += weight_count
            trained[amount_name] += weight_count * weight.requires_grad
        attention = _attention(text)
        forward = {name: 2 * used[name] + attention.get(name, 0.0) for name in used}
        backward = {name: 2 * (used[name] + trained[name]) + 2 * attention.get(name, 0.0) for name in used}
        update = {name: forward[name] + backward[name] for name in used}
        return cls(Amounts(**forward), Amounts(**update), int(getattr(text, "sliding_window", None) or 0))

    def amounts(self, lengths: Sequence[int], predicted: int, shared: Sequence[int] = ()) -> Amounts:
        """Return the amounts of causal sequences. ``shared``: lengths of prefixes that are already computed for another
        sequence."""

        def pairs(window: int) -> int:
            computed, known = (sum(causal_pairs(length, window) for length in each) for each in (lengths, shared))
            return computed - known

        tokens = sum(lengths) - sum(shared)
        return Amounts(tokens, predicted=predicted, pairs=pairs(0), window_pairs=pairs(self.window))


def expert_share(text: Any) -> float:
    """Share of the routed experts that a token uses, from a model's text config; 1 for a dense model."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    experts = next((count for name in names if (count := getattr(text, name, None))), 0)
    used = getattr(text, "num_experts_per_tok", None) or getattr(text, "num_experts_per_token", None)
    return used / experts if experts and used else 1.0


def _attention(text: Any) -> dict[str, float]:
    """Operations per pair in all layers, by kind of attention: the products with keys and values."""
    heads = int(getattr(text, "num_attention_heads", 0))
    width = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    latent = getattr(text, "qk_nope_head_dim", None)
    ends = latent + text.qk_rope_head_dim + text.v_head_dim if latent else 2 * width
    slides = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    usual = ["sliding_attention" if slides else "full_attention"] * int(text.num_hidden_layers)
    layer_types = list(getattr(text, "layer_types", None) or usual)
    names = {"pairs": "full_attention", "window_pairs": "sliding_attention"}
    return {name: 2.0 * heads * ends * layer_types.count(layer_type) for name, layer_type in names.items()}
