"""Real DeepSpeed: the result does not depend on ranks, micro-batches and recomputation (ZeRO: test_zero_engines.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import assert_equal, assert_equal_weights, train_ranks

from tests.small_models import INIT

pytestmark = pytest.mark.stack

USUAL = ("model.init.config.num_attention_heads=4", "pipeline.groups_per_step=4")
"""Two ranks can share four heads."""
PACKED = ("trainer.packing=true", "trainer.zero_stage=3", "trainer.tokens_per_microbatch=256")
TEN_STEPS = ("trainer.zero_stage=3", "stop.steps=10")
ONE_RANK = {
    "plain": (),
    "separate rows": ("trainer.share_prefixes=false",),
    "small micro-batches": ("trainer.tokens_per_microbatch=128",),
    "recomputed": ("trainer.gradient_checkpointing=true",),
    "packed": PACKED,
    "other objective": ("trainer.minibatches=2", "algorithm.kl_coef=0.5", "algorithm.aggregation=sequence_mean"),
    "one rank, ten steps": TEN_STEPS,
    "one rank, teacher": ("trainer.packing=true", "stop.steps=1"),
}
TWO_RANKS = {
    "two ranks": ("trainer.zero_stage=3",),
    "two ranks, packed, eager": ("trainer.packing=true", "trainer.attention=eager"),
    "two ranks, ten steps": TEN_STEPS,
    "two ranks, teacher": ("trainer.zero_stage=3", "stop.steps=1"),
    # Last, because it changes attention in the process for good.
    "shared sequences": ("trainer.sequence_parallel=2", *PACKED, "trainer.gradient_checkpointing=true"),
}
DIFFERENT = (
    "plain",
    "other objective",
    *(name for name in (*ONE_RANK, *TWO_RANKS) if name.endswith(("steps", "teacher"))),
)
"""Settings that are not compared with the plain one."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    from asyncrl_cli.spec.inputs import ModelInit
    from asyncrl_cli.train.model.initial import build_initial_model

    folder = tmp_path_factory.mktemp("engines")
    config = INIT["config"] | {"num_hidden_layers": 2, "num_attention_heads": 4}
    build_initial_model(ModelInit(architecture="qwen3", config=config), 256, 1, folder / "teacher")
    distill = ("algorithm.preset=distill", f"algorithm.reference_path={folder / 'teacher'}")
    found: dict[str, dict[str, Any]] = {}
    for ranks, settings in ((1, ONE_RANK), (2, TWO_RANKS)):
        words = [
            (*USUAL, f"trainer.ranks={ranks}", *setting, *(distill if name.endswith("teacher") else ()))
            for name, setting in settings.items()
        ]
        found |= zip(settings, train_ranks(folder / str(ranks), *words), strict=True)
    return found


@pytest.mark.parametrize("setting", [name for name in (*ONE_RANK, *TWO_RANKS) if name not in DIFFERENT])
def test_the_same_weights_come_out(results: dict[str, dict[str, Any]], setting: str) -> None:
    assert_equal(results[setting], results["plain"])


def test_two_ranks_are_one_for_ten_steps(results: dict[str, dict[str, Any]]) -> None:
    one, two = results["one rank, ten steps"], results["two ranks, ten steps"]
    for name, weight in one["weights"].items():
        assert (two["weights"][name] - weight).norm() < 1e-5 * weight.norm(), name
    for name in ("train/loss", "train/gradient_norm"):
        assert two["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-4, abs=1e-6), name


def test_settings_that_change_the_objective_change_the_weights(results: dict[str, dict[str, Any]]) -> None:
    plain, other = results["plain"], results["other objective"]
    moved = max((other["weights"][name] - weight).abs().max().item() for name, weight in plain["weights"].items())
    assert moved > 1e-4
    assert other["metrics"]["train/updates"] == 2
    assert other["metrics"]["train/kl_reference"] > 0


def test_a_teacher_of_another_size_is_sharded_like_the_policy(results: dict[str, dict[str, Any]]) -> None:
    one, two = results["one rank, teacher"], results["two ranks, teacher"]
    assert_equal_weights(two, one)
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-3, abs=1e-5)
    assert abs(one["metrics"]["train/kl_reference"]) > 1e-3, "the first step would be at 0 from the initial model"


def trained(folder: Path, *overrides: str) -> dict[str, Any]:
    (result,) = train_ranks(folder, (*USUAL, *overrides))
    return result


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
    one = trained(tmp_path / "one", *overrides)
    ranks = ("trainer.ranks=4", "trainer.sequence_parallel=2", "trainer.zero_stage=3")
    two = trained(tmp_path / "two groups", *overrides, *ranks)
    assert_equal_weights(two, one, atol=5e-5)  # Adam enlarges what rounds
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-3, abs=1e-5)


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
        settings = ("trainer.zero_stage=3", "trainer.gradient_checkpointing=true", "trainer.packing=true")
        results.append(trained(tmp_path / str(len(results)), *routed, *ranks, *(settings if ranks else ())))
    one, *others = results
    for other in others:
        assert_equal_weights(other, one)
        assert other["metrics"] == pytest.approx(one["metrics"], rel=1e-3, abs=1e-5)
