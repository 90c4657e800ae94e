"""A saved model keeps the generation config of the model that it was made from, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, GenerationConfig

from asyncrl_cli.spec.inputs import ModelInit
from asyncrl_cli.train.model.initial import build_initial_model, copy_model_stub
from asyncrl_cli.train.model.saving import GENERATION_CONFIG, save_model
from asyncrl_cli.train.model.tokenizer import CHAT_TEMPLATE, character_tokenizer, end_tokens

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
INIT = ModelInit(architecture="qwen3", config={**SIZES, "num_key_value_heads": 1, "head_dim": 8})
CONTRADICTORY = json.dumps({"do_sample": False, "temperature": 0.6, "eos_token_id": [1, 7]}, indent=1)
"""As some models on the hub have it: transformers loads it, and does not save it."""


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


def test_a_model_without_one_is_saved_with_that_of_its_config(source: Path, tmp_path: Path) -> None:
    (source / GENERATION_CONFIG).unlink()
    save_model(AutoModelForCausalLM.from_pretrained(source), source, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / GENERATION_CONFIG).read_text())["eos_token_id"] == 1
