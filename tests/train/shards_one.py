"""The program of test_shards.py: a rank writes its shard of the same small models under several settings.

The result has, for each setting, this rank's elements of every weight as engines get them, and the gathered full
weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ranks import Rank

from asyncrl_cli.spec.inputs import LoraSpec
from asyncrl_cli.train import deepspeed_engine as ds
from asyncrl_cli.train.model.lora import full_weights, gathered

SETTINGS = [
    *((stage, "float32", "float32", "", tied) for stage in range(4) for tied in (True, False)),
    *((stage, "bfloat16", "bfloat16", "", True) for stage in range(4)),
    *((stage, "float32", "bfloat16", "lora", True) for stage in range(4)),
    *((stage, "bfloat16", "float32", "lora", False) for stage in (0, 3)),
    (3, "float32", "float32", "offload", True),
    *((stage, "bfloat16", "float32", "adapter", True) for stage in (0, 3)),
]
"""ZeRO stage, dtype of the trainer and of engines, other settings, and whether the head is tied."""
SIZES = {
    "vocab_size": 41,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "initializer_range": 0.2,
}
"""The number of elements of most weights is not divisible by three."""


def main(rank: Rank) -> dict[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    folders = {tied: Path(f"{rank.out}.{tied}") for tied in (True, False)}
    for tied, folder in folders.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model("qwen3", **SIZES, tie_word_embeddings=tied)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    rank.join()
    return {setting: written(rank.spec, folders[setting[4]], rank.number, setting) for setting in SETTINGS}


def written(spec: Any, folder: Path, rank: int, setting: tuple[int, str, str, str, bool]) -> Any:
    """This rank's memory, with NaN in the shards of other ranks; and the gathered weights in the same dtype."""
    from asyncrl_cli.train.model.lora import adapter_matrices
    from asyncrl_cli.train.shards import adapter_layout, adapter_shards, engine_layout, shards, write_shard
    from asyncrl_cli.weights.mapped import Copies

    stage, dtype, engine_dtype, kind, _ = setting
    optimizer = spec.trainer.optimizer.model_copy(update={"learning_rate": 0.01})
    change = {"zero_stage": stage, "dtype": dtype, "optimizer": optimizer}
    change |= {"offload": "all"} if kind == "offload" else {}
    lora = LoraSpec(rank=3, alpha=7.0) if kind in ("lora", "adapter") else None
    spec = spec.model_copy(
        update={
            "trainer": spec.trainer.model_copy(update=change),
            "model": spec.model.model_copy(update={"lora": lora}),
        }
    )
    engine = ds.start_engine(spec, str(folder))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        ids = torch.randint(3, 40, (3, 12), generator=generator)
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, 0] = False
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(ids, mask).sum())
        engine.step()
    model = engine.module.model
    to = getattr(torch, engine_dtype)
    layout, own_shards = (adapter_layout, adapter_shards) if kind == "adapter" else (engine_layout, shards)
    memory = {slot.name: torch.full(slot.shape, torch.nan, dtype=to) for slot in layout(model, to)}
    again = {name: torch.full_like(tensor, torch.nan) for name, tensor in memory.items()}
    for targets in (memory, again):  # the first time must not change the model
        for name, begin, own in own_shards(model, rank, spec.trainer.ranks, stage):
            write_shard(targets[name], begin, own, Copies())
    full = {weight.name: weight.merged().to(to).clone() for weight in full_weights(model, stage)}
    if kind == "adapter":
        matrices = [(f"{weight.removesuffix('weight')}{kind}.weight", m) for weight, kind, m in adapter_matrices(model)]
        with gathered([matrix for _, matrix in matrices], stage):
            full = {name: matrix.detach().to(to).clone() for name, matrix in matrices}
    engine.destroy()
    return memory, again, full
