"""Real DeepSpeed with adapters, or with a reference model: checkpoints can be resumed, and engines, saved
models and exports have the same merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer_checkpoints import differs
from test_trainer_checkpoints import train as train_ranks

from asyncrl_cli.runs.checkpoints import Checkpoint
from asyncrl_cli.spec.inputs import LoraSpec
from asyncrl_cli.train.model.saving import export_model

pytestmark = pytest.mark.stack

LORA = LoraSpec(rank=4, alpha=8.0)
ADAPTERS = {"model.lora": "{rank: 4, alpha: 8.0}"}
SERVED = {"model.lora": "{rank: 4, alpha: 8.0, serve: adapter}"}
PENALTY = {"algorithm.kl_coef": 0.5}
KINDS: dict[str, dict[str, Any]] = {
    "adapters": {"zero_stage": 3} | ADAPTERS | PENALTY,
    "adapters-zero1": {"zero_stage": 1} | ADAPTERS | PENALTY,
    "reference": {"zero_stage": 3} | PENALTY,
    "served": {"zero_stage": 3} | SERVED,
    "served-zero1": {"zero_stage": 1} | SERVED,
}


def train(
    folder: Path, kind: str, ranks: int, source: Checkpoint | None, **changes: Any
) -> tuple[dict[str, Any], Checkpoint | None]:
    """Rank 0's results of four steps, with a checkpoint before the last one, or of the last step from ``source``."""
    trainer = {"ranks": ranks, "trainer.optimizer.learning_rate": 0.003} | KINDS[kind] | changes
    results, checkpoint = train_ranks(folder, trainer, source, source is None, 3 if source else 0, 3)
    return results[0], checkpoint


@pytest.fixture(
    scope="module",
    params=[
        "adapters",
        "reference",
        pytest.param("adapters-zero1", marks=pytest.mark.nightly),
    ],
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two ranks that trained three steps, saved a checkpoint, and trained one more step."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, request.param, *train(folder / "first", request.param, 2, None)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.rotating), 1])
def test_a_checkpoint_resumes(trained: Any, ranks: int) -> None:
    folder, kind, before, checkpoint = trained
    now, _ = train(folder / f"with-{ranks}", kind, ranks, checkpoint)
    assert differs(now["weights"], before["weights"]) == 0
    assert differs(now["published"], before["published"]) < 1e-6
    assert differs(now["weights_after"], before["weights_after"]) <= (0 if ranks == 2 else 2e-5)
    assert differs(before["weights_after"], before["weights"]) > 1e-4


def test_engines_saved_models_and_exports_have_the_same_weights(trained: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, kind, before, checkpoint = trained
    stub = folder / "first/rank-0.pt.model"
    export_model(checkpoint, str(stub), tmp_path / "export", None if kind == "reference" else LORA)
    for saved in (tmp_path / "export", folder / "first/rank-0.pt.saved"):
        model = AutoModelForCausalLM.from_pretrained(saved)
        assert differs(dict(model.named_parameters()), before["published"]) < 1e-6
    start = dict(AutoModelForCausalLM.from_pretrained(stub).named_parameters())
    moved = {name for name, weight in start.items() if not torch.equal(weight, before["published"][name])}
    assert moved == ({name for name in start if "proj" in name} if kind != "reference" else set(start))
    if "lora_" in "".join(before["weights"]):
        frozen = [name for name in before["weights"] if "lora_" not in name]
        assert all(torch.equal(before["weights"][name], start[name.replace(".base_layer", "")]) for name in frozen)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["served", "served-zero1"])
def test_adapters_do_not_resume_on_a_model_with_other_weights(tmp_path: Path, kind: str) -> None:
    """Engines read the initial model themselves, so a checkpoint cannot provide it."""
    before, checkpoint = train(tmp_path / "first", kind, 2, None)
    now, _ = train(tmp_path / "same", kind, 2, checkpoint)
    assert differs(now["weights_after"], before["weights_after"]) == 0
    with pytest.raises(AssertionError, match="this checkpoint's adapters were trained on another model"):
        train(tmp_path / "other", kind, 2, checkpoint, **{"model.init.config.initializer_range": 0.1})
