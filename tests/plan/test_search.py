"""Guesses from data sheets, and the search over allocations."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.cli.app import main
from asyncrl_cli.orchestrator.actors import buffer_settings
from asyncrl_cli.plan.guess import DataSheetIteration, Shape, engine_cost, guessed_costs, shape_of, trainer_cost
from asyncrl_cli.plan.lengths import LengthModel
from asyncrl_cli.plan.scenario import scenario_of
from asyncrl_cli.plan.search import Allocation, allocations, search
from asyncrl_cli.sizing.config import COPIES, read_config
from asyncrl_cli.sizing.estimate import with_changes
from asyncrl_cli.sizing.model import size_model
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.flops import GPUS

pytestmark = pytest.mark.slow

SPECS = Path(__file__).parents[2] / "specs"
DENSE = Shape(4.02e9, 4.02e9, 36, 32 * 128, 2 * 36 * 2 * 8 * 128)
EXPERTS = Shape(30.5e9, 3.3e9, 48, 32 * 128, 2 * 48 * 2 * 4 * 128, experts=29e9, chosen=8 / 128)


def spec(name: str = "qwen3-4b-8gpu") -> ExperimentSpec:
    return load_spec(SPECS / f"{name}.yaml").spec


@pytest.mark.parametrize(
    ("name", "parameters", "active"), [("Qwen3-4B", 4.02e9, 4.02e9), ("Qwen3-30B-A3B", 30.5e9, 3.0e9)]
)
def test_shapes_agree_with_the_published_models(name: str, parameters: float, active: float) -> None:
    config = read_config(COPIES / f"Qwen--{name}", "")
    own = spec() if name == "Qwen3-4B" else spec("qwen3-30b-a3b-4x8gpu")
    shape = shape_of(size_model(own, config), config)
    assert shape.parameters == pytest.approx(parameters, rel=0.02)
    assert shape.active == pytest.approx(active, rel=0.05)  # 3.3B with the input embeddings
    assert (shape.experts > 0) is (name != "Qwen3-4B")


def test_a_small_batch_reads_the_weights_and_a_large_one_computes() -> None:
    gpu = GPUS["h100"]
    iteration = DataSheetIteration(DENSE, gpu, 1)
    reading = 2 * DENSE.active / (0.7 * gpu.bandwidth)
    assert iteration(1) == pytest.approx(0.003 + 36 * 40e-6 + reading, rel=0.01)
    assert iteration(4096) > 2 * iteration(512) > 2 * iteration(1)
    assert DataSheetIteration(DENSE, gpu, 2)(1) < iteration(1)


def test_an_engine_across_hosts_waits_longer_for_its_all_reduces() -> None:
    within, across = (DataSheetIteration(DENSE, GPUS["h100"], gpus)(1) for gpus in (8, 16))
    assert across > within + DENSE.layers * 2 * 40e-6, "each GPU reads half as much, and it is still slower"


def test_a_larger_batch_reads_more_experts() -> None:
    assert EXPERTS.read(1) == pytest.approx(EXPERTS.active)
    assert EXPERTS.read(16) > 5 * EXPERTS.read(1)
    assert EXPERTS.read(10_000) == pytest.approx(EXPERTS.active + EXPERTS.experts * (1 - EXPERTS.chosen))


def test_no_number_of_ranks_trains_the_longest_sequence_faster() -> None:
    groups = LengthModel(1000, 0.8, 8000).groups(64, 8)
    few, many = (trainer_cost(DENSE, GPUS["h100"], ranks, groups=groups, recompute=True) for ranks in (4, 400))
    assert many.per_token_s == pytest.approx(few.per_token_s / 100)
    assert few.seconds(10_000_000, 8000) > 90 * many.seconds(1000, 10)
    assert few.seconds(100, 8000) == many.seconds(100, 8000)


def test_shared_prompts_are_trained_once() -> None:
    groups = LengthModel(100, 0.0, 100, prompt=600).groups(4, 8)
    alone, shared = (
        trainer_cost(DENSE, GPUS["h100"], 4, groups=groups, recompute=False, shares=shares) for shares in (False, True)
    )
    assert shared.per_token_s / alone.per_token_s == pytest.approx(1400 / 5600, rel=0.02)
    assert shared.longest_token_s == alone.longest_token_s


def test_contexts_cost_their_bytes() -> None:
    gpu = GPUS["h100"]
    assert engine_cost(DENSE, gpu, 2, None).per_context_token_s == DENSE.cache_bytes / (2 * 0.7 * gpu.bandwidth)


def test_allocations_use_every_gpu() -> None:
    found = list(allocations(16, 512))
    assert len(set(found)) == len(found) > 50
    assert all(one.engines * one.engine_gpus + one.ranks == 16 and one.ranks > 0 for one in found)


def test_the_search_finds_the_side_that_is_slow() -> None:
    groups = LengthModel(2000, 0.6, 8192, 512).groups(128, 8)

    def best(gpu: str) -> Allocation:
        found = search(
            spec(),
            [one for one in allocations(16, 512, (1,)) if one.max_staleness == 4],
            None,
            None,
            lambda own, room: scenario_of(
                own, buffer_settings(own), groups, guessed_costs(own, DENSE, GPUS[gpu], groups=groups, kv_tokens=room)
            ),
        )
        steps = [one.outcome.step_s for one in found.best]
        assert steps == sorted(steps)
        assert found.best[0].kv_tokens is None
        return found.best[0].allocation

    # An H20 has more bandwidth than an H100 and a seventh of its FLOPs: the trainer needs more GPUs.
    assert best("h20").ranks > best("h100").ranks


def test_allocations_that_do_not_fit_are_not_simulated() -> None:
    own = spec()
    model = size_model(own, read_config(COPIES / "Qwen--Qwen3-4B", ""))

    def unreachable(_: ExperimentSpec, __: int | None) -> Any:
        raise AssertionError("simulated")

    found = search(own, list(allocations(8, 512, (1,))), model, 6 * 10**9, unreachable)
    assert (found.best, found.simulated) == ((), 0)
    assert found.too_large > 10


def test_an_allocation_is_applied() -> None:
    own = with_changes(spec(), Allocation(2, 3, 10, 4, 77).change())
    assert (own.rollout.min_engines, own.rollout.gpus_per_engine, own.trainer.ranks) == (3, 2, 10)
    assert (own.pipeline.max_staleness, own.rollout.max_running_rollouts) == (4, 77)


# -- the command


def asyncrl(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["asyncrl", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_plan_without_a_measurement(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(SPECS / "qwen3-4b-8gpu.yaml")
    assert asyncrl(monkeypatch, "plan", path, "--mean-tokens", "2000", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["lengths"]["mean"] == pytest.approx(2000, rel=0.02)
    assert "nothing is measured" in document["plan"]["guesses"][0]
    rank, engine = document["plan"]["memory"]
    assert "rank" in rank["device"] and "engine" in engine["device"]
    assert 0 < rank["bytes"] < rank["capacity"] == 80 * 10**9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quickstart.yaml",), "nothing is measured, and no data sheet"),
        (("quickstart.yaml", "--gpus", "8"), "belong together"),
        (("qwen3-4b-8gpu.yaml", "--search"), "belong together"),
        (("qwen3-4b-8gpu.yaml", "--gpu", "abacus"), "no data sheet for"),
        (("qwen3-4b-8gpu.yaml", "--calibrate", "--calibrate-from", "latest"), "cannot be combined"),
    ],
)
def test_invalid_arguments_of_plan_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    name, *rest = arguments
    assert asyncrl(monkeypatch, "plan", str(SPECS / name), *rest) == 2
    assert message in " ".join(capsys.readouterr().err.split())
