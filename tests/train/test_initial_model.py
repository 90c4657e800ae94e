"""A model from a config: the spec's settings take effect, and settings that cannot work are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.data.tokenizer import character_tokenizer
from asyncrl_cli.spec.inputs import ModelInit
from asyncrl_cli.train.model.initial import build_initial_model, write_model_stub, write_weights
from tests.small_models import INIT

pytestmark = pytest.mark.slow

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def qwen3(**config: Any) -> ModelInit:
    return ModelInit(architecture="qwen3", config={**TINY, "num_key_value_heads": 1, "head_dim": 8, **config})


def weights(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def test_recipe_of_the_quickstart_model_has_its_sizes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    build_initial_model(ModelInit(**INIT), 256, 0, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert sum(parameter.numel() for parameter in model.parameters()) == 305_280
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.vocab_size == len(tokenizer) == 99
    assert model.config.max_position_embeddings == 4096
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id == 1
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert abs(float(model.model.layers[0].mlp.up_proj.weight.detach().std()) - 0.0653) < 0.002


@pytest.mark.parametrize("theta", [10_000.0, 500.0])
def test_the_rotary_base_takes_effect(tmp_path: Path, theta: float) -> None:
    from transformers import AutoModelForCausalLM

    build_initial_model(qwen3(rope_theta=theta), 64, 0, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    frequencies = theta ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, frequencies)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["rope_parameters"]["rope_theta"] == theta, "where vLLM reads it"


def test_the_model_stub_is_the_models_config_and_weights_do_not_change_it(tmp_path: Path) -> None:
    write_model_stub(qwen3(), 64, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "float32"
    assert not list(tmp_path.glob("*.safetensors"))
    write_weights(tmp_path, 0)
    assert json.loads((tmp_path / "config.json").read_text()) == config


def test_weights_depend_only_on_the_seed_and_leave_the_process_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        build_initial_model(qwen3(), 64, seed, tmp_path / name)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
    first, same, other = (weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_other_architectures_and_a_saved_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    character_tokenizer(64).save_pretrained(tmp_path / "tokenizer")
    init = ModelInit(architecture="llama", config=TINY, tokenizer=str(tmp_path / "tokenizer"))
    build_initial_model(init, 64, 0, tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.vocab_size == 99


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (ModelInit(architecture="qwen33"), "did you mean `qwen3`"),
        (ModelInit(architecture="gemma3"), "gemma3 is a model for images"),
        (ModelInit(architecture="vit"), "no causal language model of type 'vit'"),
        (qwen3(hiden_size=16), "did you mean `hidden_size`"),
        (qwen3(vocab_size=100), "vocab_size: follows from the tokenizer"),
        (qwen3(eos_token_id=3), "eos_token_id: follows from the tokenizer"),
        (qwen3(hidden_size="wide"), "'hidden_size' expected int"),
        (qwen3(num_hidden_layers=0), "num_hidden_layers: 0 is less than 1"),
        (qwen3(num_attention_heads=3, num_key_value_heads=2), "2 does not divide the 3 heads"),
        (qwen3(head_dim=7), "refused by Qwen3Config.*even rotary dimension"),
        (qwen3(max_position_embeddings=32), "64 is more than the model's 32 positions"),
        (
            ModelInit(architecture="llama", config={**TINY, "hidden_size": 15}),
            "is not a multiple of|number of attention heads",
        ),
        (ModelInit(architecture="qwen3", tokenizer="/no/such/folder"), "no tokenizer could be loaded"),
    ],
)
def test_impossible_settings_are_refused_before_weights_are_made(tmp_path: Path, init: ModelInit, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        write_model_stub(init, 64, tmp_path / "model")
    assert caught.value.hint
    assert not (tmp_path / "model").exists()


def test_settings_that_only_the_model_code_rejects_are_refused(tmp_path: Path) -> None:
    write_model_stub(qwen3(hidden_act="nonsense"), 64, tmp_path)
    with pytest.raises(ConfigError, match="cannot build this qwen3"):
        write_weights(tmp_path, 0)
