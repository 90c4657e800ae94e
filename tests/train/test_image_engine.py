"""Real DeepSpeed with images: the result does not depend on ZeRO stage, ranks, micro-batches and recomputation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import assert_equal, train_ranks

from tests.small_models import IMAGE_MODELS, write_image_model

pytestmark = pytest.mark.stack

IMAGES = ("model.max_images=1", "model.max_length=128", "model.freeze=[]", "pipeline.groups_per_step=4")
assert_same = partial(assert_equal, atol=5e-5)  # Adam enlarges what rounds
PACKED = ("trainer.packing=true", "trainer.tokens_per_microbatch=256", "trainer.gradient_checkpointing=true")
ONE_RANK = {"plain": (), "ZeRO 0": ("trainer.zero_stage=0",)}
TWO_RANKS = {
    "ZeRO 2": ("trainer.zero_stage=2",),
    # Ranks without images in a micro-batch, and without rows.
    "small micro-batches": ("trainer.zero_stage=3", "trainer.tokens_per_microbatch=64"),
    "packed": ("trainer.zero_stage=3", *PACKED),
    "frozen tower": ("trainer.zero_stage=3", "trainer.packing=true", "model.freeze=[vision]"),
}
RARE = {
    "gemma3": (),
    "qwen3_vl": (),
    "critic": ("algorithm.preset=ppo", "algorithm.kl_coef=0.1"),
    "adapters": ("model.lora={rank: 2}", "algorithm.kl_coef=0.1", "trainer.minibatches=2"),
    "reference": ("algorithm.kl_coef=0.1", "model.freeze=[vision]"),
}


def trained(folder: Path, ranks: int, settings: Mapping[str, tuple[str, ...]], *more: str) -> dict[str, dict[str, Any]]:
    """As ``train_ranks``, by the settings' names. Half of the groups have images (train_one.py)."""
    words = []
    for name, setting in settings.items():
        architecture = name if name in IMAGE_MODELS else "qwen2_5_vl"
        model = folder.with_name(architecture)
        if not model.exists():
            write_image_model(architecture, model)
        words.append((*IMAGES, "model.init=null", f"model.path={model}", f"trainer.ranks={ranks}", *setting, *more))
    return dict(zip(settings, train_ranks(folder, *words), strict=True))


def is_tower(name: str) -> bool:
    return ("visual" in name or "vision_tower" in name) and "merger" not in name


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("images")
    return trained(folder / "one", 1, ONE_RANK) | trained(folder / "two", 2, TWO_RANKS)


@pytest.mark.parametrize("setting", ["ZeRO 0", "ZeRO 2", "small micro-batches", "packed"])
def test_the_same_weights_come_out(results: dict[str, dict[str, Any]], setting: str) -> None:
    assert_same(results[setting], results["plain"])


def test_a_frozen_tower_keeps_its_weights_on_ranks_that_share_it(
    tmp_path: Path, results: dict[str, dict[str, Any]]
) -> None:
    from transformers import AutoModelForImageTextToText

    write_image_model("qwen2_5_vl", tmp_path)
    before = dict(AutoModelForImageTextToText.from_pretrained(tmp_path).named_parameters())
    plain = results["plain"]["weights"]
    for name, weight in results["frozen tower"]["weights"].items():
        if is_tower(name):
            assert torch.equal(weight, before[name]), name
            assert not torch.equal(plain[name], before[name]) or name.endswith("bias"), name
        elif "merger" in name and name.endswith("weight"):
            assert not torch.equal(weight, before[name]), name


@pytest.fixture(scope="module")
def rare(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """The results of one rank, and of two."""
    folder = tmp_path_factory.mktemp("rare")
    two = trained(folder / "two", 2, RARE, "trainer.zero_stage=3", *PACKED)
    return trained(folder / "one", 1, RARE), two


@pytest.mark.rotating
@pytest.mark.parametrize("setting", RARE)
def test_other_models_critic_reference_and_adapters_are_the_same_on_two_ranks(rare: Any, setting: str) -> None:
    one, two = (results[setting] for results in rare)
    assert_same(two, one)
    if setting == "adapters":
        adapted = {name for name in one["weights"] if "lora_" in name}
        assert adapted and all("language_model" in name for name in adapted)
