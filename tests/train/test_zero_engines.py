"""Real DeepSpeed with every ZeRO stage and dtype: updates that are not finite have no effect, reported norms are
correct, and small updates accumulate in bfloat16."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from engines_one import SETTINGS
from ranks import run_ranks

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.rotating), 2])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("engines")
    return run_ranks("engines_one", folder, (f"trainer.ranks={request.param}", "trainer.optimizer.learning_rate=0.001"))


@pytest.mark.parametrize("setting", [tuple(setting.values()) for setting in SETTINGS], ids=str)
def test_updates_that_are_not_finite_leave_no_trace(results: Any, setting: tuple[Any, ...]) -> None:
    for rank in results:
        spoilt = rank[setting]["spoilt"]
        for kind, result, same in spoilt["updates"]:
            assert result.skipped == same == (kind != "good")
            assert math.isfinite(result.norm) == (kind == "good")
        good = rank[setting]["good"]
        assert [result.skipped for _, result, _ in good["updates"]] == [False] * 3
        norms = [result.norm for kind, result, _ in spoilt["updates"] if kind == "good"]
        assert norms == [result.norm for _, result, _ in good["updates"]]
        assert all(torch.equal(spoilt["weights"][name], weight) for name, weight in good["weights"].items())


@pytest.mark.parametrize("setting", [tuple(setting.values()) for setting in SETTINGS], ids=str)
def test_the_norm_is_that_of_the_full_gradient(results: Any, setting: tuple[Any, ...]) -> None:
    for rank in results:
        _, result, _ = rank[setting]["good"]["updates"][0]
        assert result.norm == pytest.approx(rank[setting]["norm"], rel=1e-5 if setting[1] == "float32" else 0.02)
        assert result.norm > 10, "it is the norm before clipping"


def test_every_stage_trains_to_the_same_weights(results: Any) -> None:
    plain = results[0][(0, "float32")]["good"]["weights"]
    for stage in (*((stage, "float32") for stage in (1, 2, 3)), (2, "float32", "optimizer"), (3, "float32", "all")):
        for name, weight in results[0][stage]["good"]["weights"].items():
            # If a gradient is only a rounding error, Adam still makes a full step: single weights may differ by more.
            assert (weight - plain[name]).norm() < 1e-5 * plain[name].norm(), (stage, name)


@pytest.mark.parametrize("stage", range(4))
def test_updates_smaller_than_bfloat16_can_show_add_up(results: Any, stage: int) -> None:
    """An update of 1e-4 does not change a weight of 0.05, because the next larger number is 2.4e-4 away; seven do."""
    slow = results[0]["slow", stage]
    assert slow["optimized"] == {torch.float32}
    weights = (slow["kept"][0], slow["kept"][1], slow["weights"])
    start, once, often = (each["model.layers.0.mlp.up_proj.weight"] for each in weights)
    assert start.dtype == torch.bfloat16
    large = start.abs() > 0.04
    assert torch.equal(once[large], start[large])
    assert (often[large] != start[large]).float().mean() > 0.9


@pytest.mark.parametrize("stage", [2, 3])
def test_bfloat16_gradients_add_up_in_float32_over_ranks(results: Any, stage: int) -> None:
    """In bfloat16 the sum of two ranks is off by 1e-3."""
    assert all(rank["summed", stage] < 1e-6 for rank in results)
