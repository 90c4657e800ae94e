"""Real DeepSpeed: a checkpoint can be resumed with the same number of ranks, and with any other number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from asyncrl_cli.runs.checkpoints import Checkpoint, TrainerLayout, seal, verify
from asyncrl_cli.train.model.saving import consolidate, export_model

pytestmark = pytest.mark.stack

BASE = ("trainer.optimizer.learning_rate=0.001", "pipeline.groups_per_step=4")
TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-2}
"""Largest difference of a weight after an update with more or fewer ranks: they add gradients in another order."""


def saved_by(trainer: dict[str, Any], folder: Path) -> Checkpoint:
    """Complete a checkpoint, like the driver."""
    dtype, experts = trainer.get("dtype", "float32"), trainer.get("expert_parallel", 1)
    layout = TrainerLayout(trainer["ranks"], trainer["zero_stage"], dtype, experts)
    (folder / "run.json").write_text(json.dumps({"step": 2, "trainer": asdict(layout)}))
    seal(folder)
    return Checkpoint.from_folder(folder)


def train(
    folder: Path, trainer: dict[str, Any], source: Checkpoint | None, saves: bool, first: int, last: int
) -> tuple[list[dict[str, Any]], Checkpoint | None]:
    """The results of every rank of one trainer, and the checkpoint that it saved before its last step.

    Every trainer has its own checkpoints, in a folder with a name that is no valid regular expression.
    """
    target = folder / "c++ (1)" / "step-000002"
    if saves:
        target.mkdir(parents=True)
    else:
        folder.mkdir()
    overrides = (*BASE, *(f"{key if '.' in key else f'trainer.{key}'}={value}" for key, value in trainer.items()))
    folders = source.folder if source else None, target if saves else None
    results = run_ranks("resume_one", folder, overrides, *folders, first, last)
    return results, saved_by(trainer, target) if saves else None


def differs(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max((one[name].float() - other[name].float()).abs().max().item() for name in one)


KINDS = [
    pytest.param((0, "float32", "grpo"), id="zero0", marks=pytest.mark.nightly),
    pytest.param((1, "float32", "grpo"), id="zero1", marks=pytest.mark.nightly),
    pytest.param((2, "float32", "grpo"), id="zero2", marks=pytest.mark.rotating),
    pytest.param((3, "float32", "grpo"), id="zero3"),
    pytest.param((3, "float32", "ppo"), id="critic", marks=pytest.mark.rotating),
    pytest.param((3, "bfloat16", "grpo"), id="bfloat16", marks=pytest.mark.nightly),
]


@pytest.fixture(scope="module", params=KINDS)
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two ranks that trained two steps, saved a checkpoint, and trained one more step."""
    stage, dtype, algorithm = request.param
    trainer = {"ranks": 2, "zero_stage": stage, "dtype": dtype, "algorithm.preset": algorithm}
    folder = tmp_path_factory.mktemp("two")
    results, checkpoint = train(folder / "first", trainer, None, True, 0, 2)
    return folder, trainer, results, checkpoint


def test_other_ranks_resume_as_the_same_ones_would(two_ranks: Any) -> None:
    folder, trainer, reference, checkpoint = two_ranks
    tolerance = TOLERANCE[trainer["dtype"]]
    alone, saved_alone = train(folder / "alone", trainer | {"ranks": 1}, checkpoint, True, 2, 2)
    two_again, _ = train(folder / "two-again", trainer, saved_alone, False, 2, 2)
    for results in (alone, two_again):
        assert results[0]["updates"] == reference[0]["updates"] == 2
        assert results[0]["draws"] == reference[0]["draws"], "random numbers continue"
        assert differs(results[0]["weights"], reference[0]["weights"]) == 0
        assert differs(results[0]["weights_after"], reference[0]["weights_after"]) <= tolerance
    assert differs(reference[0]["weights_after"], reference[0]["weights"]) > 1e-4, "the last update changes weights"
    assert [path.name for path in checkpoint.folder.parent.iterdir()] == [checkpoint.folder.name], "nothing temporary"
    assert verify(checkpoint) == [], "loading changes nothing"


def test_the_same_ranks_resume_to_the_bit(two_ranks: Any) -> None:
    folder, trainer, reference, checkpoint = two_ranks
    results, _ = train(folder / "same", trainer, checkpoint, False, 2, 2)
    for before, now in zip(reference, results, strict=True):
        assert differs(now["weights_after"], before["weights_after"]) == 0
        assert now["draws"] == before["draws"], "random numbers of every rank continue"
    assert reference[0]["draws"] != reference[1]["draws"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resume_takes_changed_settings_of_the_optimizer(two_ranks: Any, tmp_path: Path, ranks: int) -> None:
    _, trainer, reference, checkpoint = two_ranks
    changed = {"trainer.optimizer.weight_decay": 0.5, "trainer.optimizer.max_grad_norm": 0.25}
    results, _ = train(tmp_path / "changed", trainer | changed | {"ranks": ranks}, checkpoint, False, 2, 2)
    assert {result["optimizer"] for result in results} == {(0.5, 0.25)} != {reference[0]["optimizer"]}
    assert differs(results[0]["weights_after"], reference[0]["weights_after"]) > 1e-5


def test_a_trainer_that_never_stepped_resumes_from_the_initial_model(two_ranks: Any, tmp_path: Path) -> None:
    _, trainer, *_ = two_ranks
    reference, checkpoint = train(tmp_path / "first", trainer, None, True, 0, 0)
    results, _ = train(tmp_path / "alone", trainer | {"ranks": 1}, checkpoint, False, 0, 0)
    assert results[0]["updates"] == 0
    assert differs(results[0]["weights"], reference[0]["weights"]) == 0
    assert differs(results[0]["weights_after"], reference[0]["weights_after"]) <= 10 * TOLERANCE[trainer["dtype"]]


def test_stages_one_and_two_are_exchangeable(two_ranks: Any) -> None:
    folder, trainer, reference, checkpoint = two_ranks
    if trainer["zero_stage"] not in (1, 2):
        pytest.skip("ZeRO 0 and 3 are not exchangeable")
    results, _ = train(folder / "stage", trainer | {"zero_stage": 3 - trainer["zero_stage"]}, checkpoint, False, 2, 2)
    assert differs(results[0]["weights"], reference[0]["weights"]) == 0
    assert differs(results[0]["weights_after"], reference[0]["weights_after"]) <= 1e-6


def test_the_weights_can_be_read_without_a_trainer(two_ranks: Any) -> None:
    _, trainer, reference, checkpoint = two_ranks
    weights = reference[0]["weights"]
    whole = consolidate(checkpoint)
    assert {tensor.dtype for tensor in whole.values()} == {torch.float32}
    dtype = getattr(torch, trainer["dtype"])
    assert all(torch.equal(whole[name].to(dtype), weights[name]) for name in weights)


def test_an_export_loads_in_transformers(two_ranks: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from asyncrl_cli.train.model.policy import Policy

    folder, trainer, reference, checkpoint = two_ranks
    stub = folder / "first/rank-0.pt.model"
    export_model(checkpoint, str(stub), tmp_path / "new/model", None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new/model")
    assert str(model.dtype) == f"torch.{trainer['dtype']}"
    assert all(torch.equal(tensor, reference[0]["weights"][name]) for name, tensor in model.named_parameters())
    probe = reference[0]["probe"]
    ids, logprobs = probe.ids, probe.logprobs
    mask = torch.ones(1, len(ids), dtype=torch.bool)
    mask[:, 0] = False
    with torch.no_grad():
        found = Policy(model, 1.0)(torch.tensor([ids]), mask)[0, 1:].float()
    torch.testing.assert_close(found, torch.from_numpy(logprobs), rtol=0, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new/model")
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(stub).get_vocab()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"], "no temporary file remains"
