"""The program of test_sequence_parallel.py: two ranks share the positions of the same rows.

The result has, for each architecture, log-probs and gradients with and without sequence parallelism, or why it was
refused.
"""

from __future__ import annotations

from typing import Any

import torch
import varlen_kernel
from ranks import Rank

SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
ROUTED: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
GROUPED: dict[str, Any] = ROUTED | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
WINDOW = {"sliding_window": 4}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, one key-value head": ("llama", {"num_key_value_heads": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3, three heads": ("qwen3", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "qwen3_moe": ("qwen3_moe", ROUTED | {"num_experts": 4}),
    "mistral, a window in all layers": ("mistral", WINDOW),
    "gemma3, a window in some layers": ("gemma3_text", WINDOW),
    "deepseek_v3, values smaller than keys": (
        "deepseek_v3",
        GROUPED | LATENT | {"num_key_value_heads": 4, "head_dim": 8},
    ),
    "glm4_moe": ("glm4_moe", GROUPED),
    "phi3, frequencies by length": ("phi3", {"rope_parameters": LONG}),
    "qwen3_5, linear attention": ("qwen3_5_text", {"num_hidden_layers": 4}),
}
VARLEN = ("qwen3", "mistral, a window in all layers", "qwen3_moe")
"""Architectures that are also computed packed with varlen, by a kernel for CPUs."""
LENGTHS = (13, 6, 9, 2)


def main(rank: Rank) -> dict[Any, Any]:
    from asyncrl_cli.core.errors import UserError
    from asyncrl_cli.train.model.policy import Policy
    from asyncrl_cli.train.model.sequence_parallel import sequence_group

    rank.join()
    sequence = sequence_group(rank.spec.trainer)
    assert sequence is not None
    results: dict[Any, Any] = {}
    for name, (kind, changes) in ARCHITECTURES.items():
        model = model_of(kind, changes)
        for packing in (False, True):
            try:
                with sequence.unused():
                    full = scored(Policy(model, 0.8, packing))
                own, gradient = scored(Policy(model, 0.8, packing, sequence))
            except UserError as error:
                results[name, packing] = error
                continue
            torch.distributed.all_reduce(gradient)  # each rank has its part of the gradient
            results[name, packing] = {"full": full, "shared": (own, gradient)}
    with varlen_kernel.installed():
        sequence.share_attention("varlen")
        for name in VARLEN:
            model = model_of(*ARCHITECTURES[name], attention="varlen")
            own, gradient = scored(Policy(model, 0.8, True, sequence))
            torch.distributed.all_reduce(gradient)
            results[name, "varlen"] = results[name, True] | {"shared": (own, gradient)}
    assert varlen_kernel.LONGEST
    return results


def model_of(kind: str, changes: dict[str, Any], attention: str = "sdpa") -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL | changes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()


def scored(policy: Any) -> tuple[Any, Any]:
    """Log-probs and entropies of rows of several lengths, and the gradient of a weighted sum of them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.rand(ids.shape, generator=generator) < 0.6
    mask &= torch.arange(ids.shape[1]) < torch.tensor(LENGTHS)[:, None]
    mask[:, 0] = False
    policy.zero_grad()
    logprobs, entropies = policy(ids, mask, "train")
    ((logprobs + 0.3 * entropies) * torch.randn(ids.shape, generator=generator)).sum().backward()
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in policy.parameters()]
    return torch.stack([logprobs, entropies]).detach(), torch.cat([each.flatten() for each in gradients])
