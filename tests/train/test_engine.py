"""Real DeepSpeed: the result does not depend on ZeRO stage, ranks, micro-batches and recomputation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import assert_equal, train_ranks

pytestmark = pytest.mark.stack

HEADS = "model.init.config.num_attention_heads=4"  # two ranks can share it
PACKED = ["trainer.packing=true", "trainer.zero_stage=3", "trainer.tokens_per_microbatch=256"]
SHARDED = ["trainer.ranks=2", "trainer.gradient_checkpointing=true", *PACKED]
SHARED = ["trainer.ranks=2", "trainer.sequence_parallel=2"]


def trained(folder: Path, *overrides: str) -> dict[str, Any]:
    return train_ranks(folder, HEADS, *overrides)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.share_prefixes=false"],
        ["trainer.zero_stage=0"],
        ["trainer.zero_stage=2"],
        ["trainer.zero_stage=3"],
        ["trainer.ranks=2", "trainer.zero_stage=3"],
        ["trainer.tokens_per_microbatch=128"],
        ["trainer.gradient_checkpointing=true"],
        PACKED,
        [*SHARED, *PACKED, "trainer.gradient_checkpointing=true"],
        ["trainer.packing=true", "trainer.attention=eager", "trainer.ranks=2"],
    ],
    ids=lambda overrides: ",".join(item.removeprefix("trainer.") for item in overrides),
)
def test_the_same_weights_come_out(tmp_path: Path, plain: dict[str, Any], overrides: list[str]) -> None:
    assert_equal(trained(tmp_path, *overrides), plain)


def test_two_ranks_are_one_for_twenty_steps(tmp_path: Path) -> None:
    settings = ("trainer.zero_stage=3", "stop.steps=20", "pipeline.groups_per_step=4")
    one, two = (trained(tmp_path / str(number), f"trainer.ranks={number}", *settings) for number in (1, 2))
    for name, weight in one["weights"].items():
        assert (two["weights"][name] - weight).norm() < 1e-5 * weight.norm(), name
    for name in ("train/loss", "train/gradient_norm"):
        assert two["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-4, abs=1e-6), name


def test_settings_that_change_the_objective_change_the_weights(tmp_path: Path, plain: dict[str, Any]) -> None:
    other = trained(tmp_path, "trainer.minibatches=2", "algorithm.kl_coef=0.5", "algorithm.aggregation=sequence_mean")
    moved = max((other["weights"][name] - weight).abs().max().item() for name, weight in plain["weights"].items())
    assert moved > 1e-4
    assert other["metrics"]["train/updates"] == 2
    assert other["metrics"]["train/kl_reference"] > 0


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.preset=ppo", "algorithm.kl_coef=0.1"],
        pytest.param(
            ["algorithm.preset=rloo", "algorithm.kl_coef=0.1", "trainer.epochs=2"], marks=pytest.mark.rotating
        ),
    ],
    ids=lambda overrides: overrides[0].removeprefix("algorithm.preset="),
)
def test_sums_over_ranks_make_their_number_irrelevant(tmp_path: Path, overrides: list[str]) -> None:
    """Penalties in the reward, whitened advantages and a critic need sums over ranks before the first update.

    Two of four ranks have the same rows, which must be counted once.
    """
    (tmp_path / "one").mkdir()
    (tmp_path / "two groups").mkdir()
    one = trained(tmp_path / "one", *overrides)
    ranks = ("trainer.ranks=4", "trainer.sequence_parallel=2", "trainer.zero_stage=3")
    two = trained(tmp_path / "two groups", *overrides, *ranks)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(
            two["weights"][name], weight, rtol=1e-4, atol=5e-5, msg=name
        )  # Adam enlarges what rounds
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-3, abs=1e-5)


def test_a_teacher_of_another_size_is_sharded_like_the_policy(tmp_path: Path) -> None:
    from asyncrl_cli.spec.inputs import ModelInit
    from asyncrl_cli.spec.load import load_spec
    from asyncrl_cli.train.model.initial import build_initial_model

    own = load_spec("specs/quickstart.yaml").spec.model
    assert own.init is not None
    config = own.init.config | {"num_hidden_layers": 2, "num_attention_heads": 4}
    build_initial_model(ModelInit(architecture="qwen3", config=config), own.max_length, 1, tmp_path / "teacher")
    distill = ("algorithm.preset=distill", f"algorithm.reference_path={tmp_path / 'teacher'}")
    results = []
    for ranks in (["trainer.packing=true"], ["trainer.ranks=2", "trainer.zero_stage=3"]):
        (folder := tmp_path / str(len(results))).mkdir()
        results.append(trained(folder, *distill, *ranks, "stop.steps=1"))
    one, two = results
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, rtol=1e-4, atol=2e-5, msg=name)
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-3, abs=1e-5)
    assert abs(one["metrics"]["train/kl_reference"]) > 1e-3, "the first step would be at 0 from the initial model"


@pytest.mark.rotating
def test_recorded_experts_are_used_alike_by_every_rank_and_setting(tmp_path: Path) -> None:
    """Recomputed layers use the same experts; packed rows and the reference use the recorded ones. So do four ranks
    that divide the experts and share sequences."""
    config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    routed = ["model.init.architecture=qwen3_moe", "algorithm.router_replay=true", "algorithm.kl_coef=0.1"]
    routed += [f"model.init.config.{name}={value}" for name, value in config.items()]
    results = []
    divided = ("trainer.ranks=4", "trainer.expert_parallel=4", "trainer.sequence_parallel=2")
    for ranks in ((), ("trainer.ranks=2",), divided):
        (folder := tmp_path / str(len(results))).mkdir()
        settings = ("trainer.zero_stage=3", "trainer.gradient_checkpointing=true", "trainer.packing=true")
        results.append(trained(folder, *routed, *ranks, *(settings if ranks else ())))
    one, *others = results
    for other in others:
        assert other["weights"].keys() == one["weights"].keys()
        for name, weight in one["weights"].items():
            torch.testing.assert_close(other["weights"][name], weight, rtol=1e-4, atol=2e-5, msg=name)
        assert other["metrics"] == pytest.approx(one["metrics"], rel=1e-3, abs=1e-5)
