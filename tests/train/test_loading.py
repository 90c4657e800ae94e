"""Real DeepSpeed: a loaded model equals the model that transformers loads, and no rank ever holds all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loading_one import BROKEN, MEMORY
from ranks import run_ranks

from tests.small_models import ARCHITECTURES, SMALL, small_model

pytestmark = pytest.mark.stack

TIED = "qwen3-tied"
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "num_hidden_layers": 12}
LARGE = {**SMALL, **EXPERTS, "hidden_size": 512, "intermediate_size": 512, "vocab_size": 1000}
"""75 M weights, 302 MB, in 12 layers with fused experts: the largest weight has 16.8 MB."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved models: one of every architecture, one with tied embeddings, a damaged one, and a larger one."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models")
    for architecture in ("qwen3", "qwen3_moe", "mixtral", "gemma3_text", "deepseek_v3"):
        small_model(architecture).save_pretrained(folder / architecture, max_shard_size="200KB")
    for name, architecture, sizes in ((TIED, "qwen3", SMALL), (MEMORY, "qwen3_moe", LARGE)):
        config = AutoConfig.for_model(architecture, **sizes, tie_word_embeddings=name == TIED)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / name)
    small_model("qwen3").save_pretrained(folder / BROKEN)
    weights = load_file(folder / BROKEN / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 5)
    save_file(weights, folder / BROKEN / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.rotating), 2])
def results(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("loading")
    return run_ranks("loading_one", folder, (f"trainer.ranks={request.param}",), models)


def test_it_is_the_model_that_transformers_loads(results: Any) -> None:
    for rank in results:
        compared = {kind: names for kind, names in rank.items() if isinstance(names, list)}
        assert len(compared) == 3 * 6 and {name for name, *_ in compared} <= {*ARCHITECTURES, TIED}
        assert {kind: names for kind, names in compared.items() if names} == {}


def test_all_ranks_refuse_a_damaged_model(results: Any) -> None:
    for rank in results:
        assert "model.layers.1.mlp.up_proj.weight is [3, 5], but [128, 64] in the model" in rank[BROKEN]


def test_no_rank_holds_the_whole_model_next_to_its_shards(results: Any, models: Path) -> None:
    """Unlike transformers alone, which holds the whole model. Both include freed memory that the C library keeps."""
    whole = sum(file.stat().st_size for file in (models / MEMORY).glob("*.safetensors"))
    assert whole > 300e6
    for rank in results:
        taken, alone = rank[MEMORY, False], rank[MEMORY, True]
        # The shards of a single rank are the whole model, so less memory can be saved.
        saved = 0.5 * whole if len(results) > 1 else 0.1 * whole
        assert taken < alone - saved, f"{taken / 1e6:.0f} and {alone / 1e6:.0f} MB"
