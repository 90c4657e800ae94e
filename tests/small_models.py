"""Small models: a trained one, and random weights for the architectures that docs/models.md lists."""

from __future__ import annotations

import shutil
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


IMAGE_FOLDERS = Path(__file__).parent / "fixtures/image_models"
"""Config, tokenizer and processor of small vision-language models. An image token stands for 28 × 28 pixels."""
IMAGE_MODELS = ("gemma3", "qwen2_5_vl", "qwen3_vl")
"""The architectures in ``IMAGE_FOLDERS``."""


def write_image_model(architecture: str, folder: Path, seed: int = 0) -> None:
    """Write a model of ``IMAGE_FOLDERS`` with random weights, which depend only on the seed, to a folder."""
    from safetensors.torch import load_file, save_file

    from asyncrl_cli.train.model.initial import write_weights

    shutil.copytree(IMAGE_FOLDERS / architecture, folder, dirs_exist_ok=True)
    write_weights(folder, seed)
    if architecture == "gemma3":  # vLLM requires the names on the hub, which transformers gives only a loaded model
        weights = load_file(folder / "model.safetensors")
        renamed = {name.replace("vision_tower.", "vision_tower.vision_model.", 1): weights[name] for name in weights}
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
