"""Real DeepSpeed with divided experts: checkpoints can be resumed, and contain the model's own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_trainer_checkpoints import differs, train
from transformers import AutoModelForCausalLM

from asyncrl_cli.train.model.saving import consolidate, export_model

pytestmark = pytest.mark.stack

MIXTURE = {
    "model.init.architecture": "mixtral",
    "model.init.config.num_local_experts": 4,
    "model.init.config.intermediate_size": 64,
}
TRAINER: dict[str, Any] = {"ranks": 2, "zero_stage": 3, "expert_parallel": 2} | MIXTURE


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two ranks that divide the experts: they trained two steps, saved a checkpoint, and trained one more step."""
    folder = tmp_path_factory.mktemp("divided")
    results, checkpoint = train(folder / "first", TRAINER, None, True, 0, 2)
    assert checkpoint is not None
    return folder, results, checkpoint


@pytest.mark.rotating
def test_the_same_ranks_resume_to_the_bit(divided: Any) -> None:
    folder, reference, checkpoint = divided
    results, _ = train(folder / "same", TRAINER, checkpoint, False, 2, 2)
    for before, now in zip(reference, results, strict=True):
        assert differs(now["weights_after"], before["weights_after"]) == 0
        assert now["draws"] == before["draws"], "random numbers of every rank continue"
    assert differs(reference[0]["weights_after"], reference[0]["weights"]) > 1e-4, "the last update changes weights"


@pytest.mark.nightly
@pytest.mark.parametrize("experts", [2, 4])
def test_other_ranks_resume_as_the_same_ones_would(divided: Any, experts: int) -> None:
    folder, reference, checkpoint = divided
    change = {"ranks": 4, "expert_parallel": experts}
    results, saved = train(folder / f"four-{experts}", TRAINER | change, checkpoint, True, 2, 2)
    assert differs(results[0]["published"], reference[0]["published"]) == 0
    again, _ = train(folder / f"two-{experts}", TRAINER, saved, False, 2, 2)
    for before, now in zip(reference, again, strict=True):
        assert differs(now["weights_after"], before["weights_after"]) <= 1e-6
    assert [path.name for path in checkpoint.folder.parent.iterdir()] == [checkpoint.folder.name], "nothing temporary"


def test_saved_exported_and_published_weights_are_the_same(divided: Any, tmp_path: Path) -> None:
    folder, reference, checkpoint = divided
    published = reference[0]["published"]
    whole = consolidate(checkpoint)
    assert torch.equal(whole.pop("lm_head.weight"), whole["model.embed_tokens.weight"]), "they are tied"
    assert differs(whole, published) == 0
    stub = folder / "first/rank-0.pt.model"
    export_model(checkpoint, str(stub), tmp_path / "model", None)
    exported, saved, initial = map(load_folder, (tmp_path / "model", folder / "first/rank-0.pt.saved", stub))
    assert exported.keys() == saved.keys() == initial.keys(), "the names of the model's checkpoints"
    assert any(".experts.3.w2." in name for name in exported)
    assert differs(exported, saved) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert differs(dict(model.named_parameters()), published) == 0


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
