"""Small models: a trained one, and random weights for the architectures that docs/models.md lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

CHAIN_SUM = Path(__file__).parents[1] / "specs/models/chain-sum-0.3M"
"""A trained model that mostly guesses sums."""
INIT: dict[str, Any] = yaml.safe_load((CHAIN_SUM / "recipe.yaml").read_text())["model"]["init"]
UNTRAINED: dict[str, Any] = {"path": None, "init": INIT}
"""Keys of `model` for random weights in the same architecture."""

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
}
ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": {"num_hidden_layers": 4},
    "gemma3_text": {"sliding_window": 16},
    "gemma3": {"sliding_window": 16},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {**ROUTED, **LATENT, "num_key_value_heads": 4, "topk_method": "noaux_tc"},
    "glm4_moe": ROUTED,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
}
BIASES_AND_FUSED_TENSORS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"head_dim": 16},
    "phi3": {"head_dim": 16, "pad_token_id": 0},
}
"""More architectures: without and with biases, and with checkpoints that have fused matrices."""

VISION_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION: dict[str, dict[str, Any]] = {"gemma3": {**VISION_SIZES, "image_size": 28, "patch_size": 14}}
"""Sizes of vision models. For these architectures, the sizes above describe only the text model."""


def small_model(architecture: str) -> Any:
    """A causal language model in float32; every weight and persistent buffer has random numbers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = SMALL | (ARCHITECTURES | BIASES_AND_FUSED_TENSORS)[architecture]
    if architecture in VISION:
        config = AutoConfig.for_model(architecture, text_config=sizes, vision_config=VISION[architecture])
    else:
        config = AutoConfig.for_model(architecture, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for tensor in model.state_dict().values():
        tensor.normal_()
    return model


LANGUAGE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
TOWER: dict[str, Any] = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": 14}
IMAGE_MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**LANGUAGE, "sliding_window": 16},
        "vision_config": {**VISION_SIZES, "image_size": 56, "patch_size": 14},
        "mm_tokens_per_image": 4,
    },
    "qwen2_5_vl": {
        "tie_word_embeddings": True,
        "text_config": {**LANGUAGE, "rope_parameters": MROPE},
        "vision_config": {**TOWER, "fullatt_block_indexes": [1], "window_size": 56},
    },
    "qwen3_vl": {
        # Only vLLM reads the last key. transformers knows that this architecture has it.
        "text_config": {**LANGUAGE, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        "vision_config": {**TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    },
}
"""`model.init.config` of small vision-language models, by architecture. An image token stands for 28 × 28 pixels."""
