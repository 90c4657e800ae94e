"""Engines find in a version's memory what `save_pretrained` writes: every tensor of a checkpoint, by name and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncrl_cli.train.model.checkpoint_names import with_checkpoint_parts
from asyncrl_cli.train.model.policy import PolicyError
from asyncrl_cli.train.shards import engine_layout, shards, write_shard
from asyncrl_cli.weights.copies import Copies
from asyncrl_cli.weights.layout import TensorSlot, plan_slots, size_of

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
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
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": {"num_hidden_layers": 4},
    "gemma3_text": {"sliding_window": 16},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {**ROUTED, **LATENT, "num_key_value_heads": 4},
    "glm4_moe": ROUTED,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
}


def model_of(architecture: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(architecture, **SMALL | ARCHITECTURES[architecture])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for tensor in model.state_dict().values():
        tensor.normal_()
    return model


def view(memory: torch.Tensor, slot: TensorSlot) -> torch.Tensor:
    return memory[slot.offset : slot.offset + slot.nbytes].view(slot.torch_dtype).view(slot.shape)


@pytest.mark.slow  # importing the models of eight architectures
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_memory_of_a_version_has_every_tensor_of_the_checkpoint(architecture: str, tmp_path: Any) -> None:
    from safetensors.torch import load_file

    model = model_of(architecture)
    model.save_pretrained(tmp_path)
    slots = engine_layout(model, torch.float32)
    memory = torch.zeros(size_of(slots), dtype=torch.uint8)
    own = {slot.name: view(memory, slot) for slot in slots}
    for name, begin, elements in shards(model, rank=0, ranks=1, zero_stage=0):
        write_shard(own[name], begin, elements, Copies())
    parts = {part.name: part for slot in slots for part in slot.parts or (slot,)}
    saved = load_file(tmp_path / "model.safetensors")
    assert parts.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(view(memory, parts[name]), tensor), name


def test_a_tensor_that_is_computed_from_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading

    def transposed(_: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"other": state["weight"].transpose(0, 1).contiguous()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", transposed)
    slots = plan_slots([("weight", torch.float32, (3, 4, 5))])
    model = torch.nn.Module()
    model.config = type("Config", (), {"model_type": "strange"})()  # type: ignore[assignment]
    with pytest.raises(PolicyError, match="the checkpoint's other is not a part of the model's weight"):
        with_checkpoint_parts(model, slots)
