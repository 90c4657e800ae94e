"""A saved model keeps its initial model's generation config, byte for byte. A model saved while weights are gathered is
the same, in as many files as needed, with at most two files in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from asyncrl_cli.data.tokenizer import CHAT_TEMPLATE, character_tokenizer
from asyncrl_cli.rollout.response_text import end_tokens
from asyncrl_cli.spec.inputs import ModelInit
from asyncrl_cli.train.model import saving
from asyncrl_cli.train.model.initial import build_initial_model, copy_model_stub
from asyncrl_cli.train.model.lora import full_weights
from asyncrl_cli.train.model.saving import GENERATION_CONFIG, save_model, save_while_gathered
from asyncrl_cli.train.shards import engine_layout

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
INIT = ModelInit(architecture="qwen3", config={**SIZES, "num_key_value_heads": 1, "head_dim": 8})
CONTRADICTORY = json.dumps({"do_sample": False, "temperature": 0.6, "eos_token_id": [1, 7]}, indent=1)
"""As in some models on the hub: transformers loads it, but refuses to save it."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    build_initial_model(INIT, 64, 0, tmp_path / "source")
    (tmp_path / "source" / GENERATION_CONFIG).write_text(CONTRADICTORY)
    return tmp_path / "source"


def test_a_generation_config_is_copied_also_one_that_transformers_refuses_to_save(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="temperature"):
        GenerationConfig.from_pretrained(source).save_pretrained(tmp_path / "refused")
    save_model(AutoModelForCausalLM.from_pretrained(source), source, tmp_path / "saved")
    template = tmp_path / "template.jinja"
    template.write_text(CHAT_TEMPLATE)
    copy_model_stub(str(source), str(template), tmp_path / "stub")
    for folder in (tmp_path / "saved", tmp_path / "stub"):
        assert (folder / GENERATION_CONFIG).read_text() == CONTRADICTORY
        assert end_tokens(folder, character_tokenizer(64)) == {1, 7}


def test_a_model_without_generation_config_is_saved_with_its_configs_settings(source: Path, tmp_path: Path) -> None:
    (source / GENERATION_CONFIG).unlink()
    save_model(AutoModelForCausalLM.from_pretrained(source), source, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / GENERATION_CONFIG).read_text())["eos_token_id"] == 1


SMALL = {"vocab_size": 41, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12}
ROUTED = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("file_bytes", [10**9, 6_000])
@pytest.mark.parametrize(("architecture", "tied"), [("qwen3", True), ("qwen3_moe", False)])
def test_a_model_saved_while_gathered_is_what_transformers_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, tied: bool, file_bytes: int
) -> None:
    """Experts are one tensor in the model, and many tensors in its checkpoint."""
    more = ROUTED if architecture == "qwen3_moe" else {}
    config = AutoConfig.for_model(architecture, **SMALL | more, tie_word_embeddings=tied)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    slots = engine_layout(model, torch.float32)  # engines may have another dtype
    wanted, saved = tmp_path / "wanted", tmp_path / "saved"
    save_model(model, tmp_path, wanted, max_shard_size=file_bytes)
    saved.mkdir()
    (saved / "model.safetensors").write_bytes(b"of an earlier save, in one file")
    monkeypatch.setattr(saving, "FILE_BYTES", file_bytes)
    on_disk: list[int] = []

    def weights() -> Iterator[Any]:
        for weight in full_weights(model, 0):
            on_disk.append(len(list(saved.glob("*.safetensors"))))
            yield weight

    save_while_gathered(model, tmp_path, saved, slots, weights())
    others = ({path.name for path in folder.iterdir() if path.suffix != ".safetensors"} for folder in (saved, wanted))
    assert len(set(map(frozenset, others))) == 1
    assert (saved / "config.json").read_bytes() == (wanted / "config.json").read_bytes()
    files = list(saved.glob("*.safetensors"))
    if file_bytes < 10**9:
        ours, theirs = (json.loads((folder / saving.INDEX).read_text()) for folder in (saved, wanted))
        assert ours["weight_map"].keys() == theirs["weight_map"].keys()
        assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
        assert max(path.stat().st_size for path in files if len(load_file(path)) > 1) < 2 * file_bytes
        assert on_disk[0] == 0
        assert on_disk[-1] >= len(files) - 2 > 1, "files are written before all weights are gathered"
    one, other = tensors_in(saved), tensors_in(wanted)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)
    again = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
