"""Adapters in the folder of peft, which computes with them what the trainer does; the next run starts with them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_lora import IDS, LORA, make, trained

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.train.model.adapter_folder import CONFIG, load_adapter, save_adapter

pytestmark = pytest.mark.slow


def matrices(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_adapter(matrices(trained(LORA)), LORA, "some/model", tmp_path)
    return tmp_path


def test_peft_computes_with_the_folder_what_the_trainer_computes(folder: Path) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(make(None), str(folder)).eval()
    assert json.loads((folder / CONFIG).read_text())["base_model_name_or_path"] == "some/model"
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, trained(LORA)(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target_modules", ["all-linear", ["q_proj", "down_proj"]])
def test_the_next_run_starts_with_the_same_bits(tmp_path: Path, target_modules: Any) -> None:
    lora = LORA.model_copy(update={"target_modules": target_modules, "path": str(tmp_path)})
    saved = trained(lora)
    save_adapter(matrices(saved), lora, "some/model", tmp_path)
    model = make(lora)
    load_adapter(model, lora)
    assert all(torch.equal(matrix, matrices(model)[name]) for name, matrix in matrices(saved).items())
    load_adapter(make(lora, device="meta"), lora)


def test_a_folder_of_peft_itself_is_loaded(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    peft_model = get_peft_model(make(None), LoraConfig(r=3, lora_alpha=7, target_modules="all-linear"))
    peft_model.save_pretrained(str(tmp_path))
    load_adapter(make(LORA), LORA.model_copy(update={"path": str(tmp_path)}))


@pytest.mark.parametrize(
    ("config", "spec", "location", "reason"),
    [
        ({"use_dora": True}, {}, r"model\.lora\.path.*adapter_config\.json", "use_dora true"),
        ({"rank_pattern": {"q_proj": 8}}, {}, r"model\.lora\.path", "rank_pattern"),
        ({}, {"rank": 4}, r"model\.lora\.rank", "has rank 3, and the spec 4"),
        ({}, {"alpha": 8.0}, r"model\.lora\.alpha", "has alpha 7.0, and the spec 8"),
        ({}, {"target_modules": ["q_proj"]}, r"model\.lora\.target_modules", "the spec's adapters lack model.layers.0"),
    ],
)
def test_an_adapter_that_the_spec_does_not_describe_is_refused(
    folder: Path, config: dict[str, Any], spec: dict[str, Any], location: str, reason: str
) -> None:
    saved_config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(saved_config | config))
    lora = LORA.model_copy(update={"path": str(folder), **spec})
    with pytest.raises(ConfigError, match=re.escape(reason)) as refused:
        load_adapter(make(lora), lora)
    assert re.match(location, refused.value.location or "")
    assert refused.value.hint


def test_an_adapter_of_another_model_and_a_folder_without_one_are_refused(folder: Path) -> None:
    lora = LORA.model_copy(update={"path": str(folder)})
    with pytest.raises(ConfigError, match=r"has the shape \(3, 24\), and the model needs \(3, 20\)"):
        load_adapter(make(lora, hidden_size=20), lora)
    (folder / CONFIG).unlink()
    with pytest.raises(ConfigError, match="has no adapter"):
        load_adapter(make(lora), lora)
