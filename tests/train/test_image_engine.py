"""Real DeepSpeed with images: the result does not depend on ZeRO stage, ranks, micro-batches and recomputation."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import assert_equal, train_ranks

from tests.small_models import IMAGE_MODELS

pytestmark = pytest.mark.stack

IMAGES = ("model.max_images=1", "model.max_length=128", "model.freeze=[]", "pipeline.groups_per_step=4")
assert_same = partial(assert_equal, atol=5e-5)  # Adam enlarges what rounds
SHARDED = ["trainer.ranks=2", "trainer.zero_stage=3"]
PACKED = ["trainer.packing=true", "trainer.tokens_per_microbatch=256", "trainer.gradient_checkpointing=true"]


def trained(folder: Path, *overrides: str, architecture: str = "qwen2_5_vl") -> dict[str, Any]:
    """As ``train_ranks``. Half of the groups have images (train_one.py)."""
    init = {"architecture": architecture, "config": IMAGE_MODELS[architecture]}
    return train_ranks(folder, *IMAGES, f"model.init={json.dumps(init)}", *overrides)


def is_tower(name: str) -> bool:
    return ("visual" in name or "vision_tower" in name) and "merger" not in name


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.zero_stage=0"],
        ["trainer.ranks=2", "trainer.zero_stage=2"],
        [*SHARDED, "trainer.tokens_per_microbatch=64"],  # ranks without images in a micro-batch, and without rows
        [*SHARDED, *PACKED],
    ],
    ids=lambda overrides: ",".join(item.removeprefix("trainer.") for item in overrides),
)
def test_the_same_weights_come_out(tmp_path: Path, plain: dict[str, Any], overrides: list[str]) -> None:
    assert_same(trained(tmp_path, *overrides), plain)


@pytest.mark.rotating
@pytest.mark.parametrize("architecture", ["gemma3", "qwen3_vl"])
def test_other_models_are_the_same_on_two_ranks(tmp_path: Path, architecture: str) -> None:
    plain = trained(tmp_path / "one", architecture=architecture)
    assert_same(trained(tmp_path / "two", *SHARDED, *PACKED, architecture=architecture), plain)


def test_a_frozen_tower_keeps_its_weights_on_ranks_that_share_it(tmp_path: Path, plain: dict[str, Any]) -> None:
    from transformers import AutoModelForImageTextToText

    other = trained(tmp_path, "model.freeze=[vision]", *SHARDED, "trainer.packing=true")
    before = dict(AutoModelForImageTextToText.from_pretrained(tmp_path / "rank-0.pt.model").named_parameters())
    for name, weight in other["weights"].items():
        if is_tower(name):
            assert torch.equal(weight, before[name]), name
            assert not torch.equal(plain["weights"][name], before[name]) or name.endswith("bias"), name
        elif "merger" in name and name.endswith("weight"):
            assert not torch.equal(weight, before[name]), name


@pytest.mark.rotating
@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.preset=ppo", "algorithm.kl_coef=0.1"],
        ["model.lora={rank: 2}", "algorithm.kl_coef=0.1", "trainer.minibatches=2"],
        ["algorithm.kl_coef=0.1", "algorithm.reference_update_every=1", "model.freeze=[vision]"],
    ],
    ids=["critic", "adapters", "reference"],
)
def test_critic_reference_and_adapters_see_the_images_on_any_number_of_ranks(
    tmp_path: Path, overrides: list[str]
) -> None:
    one = trained(tmp_path / "one", *overrides)
    two = trained(tmp_path / "two", *overrides, *SHARDED, *PACKED)
    assert_same(two, one)
    if "lora" in overrides[0]:
        adapted = {name for name in one["weights"] if "lora_" in name}
        assert adapted and all("language_model" in name for name in adapted)
