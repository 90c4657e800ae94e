"""Presets of algorithms and corrections: tables of defaults, which the keys of a spec override."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from asyncrl_cli.spec.algorithm import (
    CORRECTION_PRESETS,
    PRESETS,
    AlgorithmName,
    AlgorithmSpec,
    CorrectionName,
)
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.problems import SpecError

QUICKSTART = "specs/quickstart.yaml"
PARTS = ("algorithm.reward_parts={reward: 1.0, format: 0.5}", "algorithm.reward_aggregation=normalize_then_sum")
SINGLE = ("algorithm.preset=single_rollout", "rollout.group_size=1", "pipeline.groups_per_step=256")
TEACHER = ("algorithm.preset=distill", "algorithm.reference_path=./specs")


def test_every_name_has_its_table() -> None:
    assert set(get_args(AlgorithmName)) == set(PRESETS)
    assert set(get_args(CorrectionName)) == set(CORRECTION_PRESETS)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_sets_its_keys_and_no_others(name: str) -> None:
    plain, chosen = AlgorithmSpec(), AlgorithmSpec(preset=name)  # type: ignore[arg-type]
    changed = {key for key in AlgorithmSpec.model_fields if getattr(plain, key) != getattr(chosen, key)} - {"preset"}
    assert changed == set(PRESETS[name])
    assert {key: getattr(chosen, key) for key in changed} == PRESETS[name]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_valid_without_a_warning(name: str) -> None:
    more = {"distill": ["algorithm.reference_path=./specs"], "single_rollout": SINGLE}.get(name, [])
    loaded = load_spec(QUICKSTART, [f"algorithm.preset={name}", *more])
    assert loaded.warnings == ()


def test_keys_next_to_a_preset_win_and_keys_below_it_are_dropped(tmp_path: Path) -> None:
    spec = load_spec(QUICKSTART, ["algorithm.preset=gspo"]).spec  # the file says clip_high: 0.28
    assert (spec.algorithm.clip_high, spec.algorithm.loss) == (4e-4, "gspo")
    for order in (1, -1):
        spec = load_spec(QUICKSTART, ["algorithm.preset=gspo", "algorithm.clip_high=0.5"][::order]).spec
        assert (spec.algorithm.clip_high, spec.algorithm.clip_low) == (0.5, 3e-4)
    base, over = tmp_path / "base.yaml", tmp_path / "over.yaml"
    base.write_text(
        Path(QUICKSTART)
        .read_text()
        .replace("clip_high: 0.28", "correction: {cap: 3.0}, entropy_coef: 0.5")
        .replace("./models", str(Path(QUICKSTART).absolute().parent / "models"))
    )
    over.write_text("extends: base.yaml\nalgorithm: {correction: {preset: icepop}}\n")
    algorithm = load_spec(str(over), []).spec.algorithm
    assert (algorithm.correction.cap, algorithm.correction.mask_high, algorithm.entropy_coef) == (None, 5.0, 0.5)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.correction.level=token", "algorithm.correction.proximal=behaviour"], "would correct twice"),
        (["algorithm.correction.level=null"], "has no effect without level"),
        (["algorithm.correction.preset=icepop", "algorithm.correction.mask_low=6.0"], "is not below mask_high"),
        (["algorithm.correction.reject_by=k3"], "has no effect without a bound"),
        (["algorithm.correction.reject_by=k2", "algorithm.correction.reject_low=0.5"], "k2 has no lower bound"),
        (
            ["algorithm.correction.preset=geometric", "algorithm.correction.reject_low=2.0"],
            "is not above the lower bound",
        ),
        (["algorithm.correction.preset=geometric", "algorithm.correction.reject_by=null"], "without reject_by"),
        (["algorithm.correction.reject_over=token"], "has no effect without reject_by"),
        (["rollout.group_size=1"], "compares the rollouts of a group"),
        (["rollout.group_size=1", "algorithm.advantage=turn_mean"], "advantage turn_mean compares the rollouts"),
        (["algorithm.preset=single_rollout"], "earlier ones, and a group has 8"),
        ([*SINGLE, "pipeline.groups_per_step=1"], "normalized over the groups of a step, and 1 is too few"),
        ([*SINGLE, "algorithm.uniform_groups=skip"], "skip excludes every group"),
        ([*SINGLE, *PARTS], "and advantage running_baseline does not"),
        (["algorithm.reward_parts={reward: 1.0, format: 0}"], "has no effect with weight 0"),
        (["algorithm.reward_aggregation=normalize_then_sum"], "has no effect without reward_parts"),
        ([*PARTS, "algorithm.advantage=turn_norm"], "and advantage turn_norm does not"),
        ([*PARTS, "algorithm.overlong_penalty=1.0"], "belongs to a single reward"),
        ([*PARTS, "algorithm.kl_coef=0.1", "algorithm.kl_placement=reward"], "belongs to a single reward"),
        ([*PARTS, "algorithm.reward_coef=2.0"], "belongs to a single reward"),
        (
            ["model={path: null, init: {architecture: qwen3}}", "algorithm.router_replay=true"],
            "the experts of qwen3 cannot be replayed",
        ),
        (["algorithm.preset=distill"], "missing: distill learns from a teacher"),
        (["algorithm.reference_path=./specs"], "has no effect without kl_coef"),
        (["algorithm.reference_path=./nowhere", "algorithm.kl_coef=1.0"], "nowhere is not a folder"),
        ([*TEACHER, "algorithm.uniform_groups=skip"], "without rewards every group is uniform"),
        ([*TEACHER, "algorithm.uniform_groups=reject"], "reject compares rewards, and reward_coef is 0"),
        (["algorithm.reward_coef=0.0"], "0 leaves nothing to learn from"),
        (["task.use=prompts", "task.options={}"], "the task `prompts` has no rewards"),
        (["task={mix: [{name: a, use: prompts}]}"], "the task `prompts` has no rewards"),
        (
            ["rollout.group_size=1", "algorithm.preset=reinforce_pp", "algorithm.uniform_groups=reject"],
            "reject excludes every group",
        ),
    ],
)
def test_choices_that_contradict_each_other_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        load_spec(QUICKSTART, overrides)


@pytest.mark.parametrize("preset", ["ppo", "reinforce_pp", "single_rollout"])
def test_advantages_without_a_group_take_groups_of_one(preset: str) -> None:
    load_spec(QUICKSTART, ["rollout.group_size=1", f"algorithm.preset={preset}"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.correction.preset=decoupled"], "no correction for rollouts"),
        (["algorithm.correction.preset=decoupled", "algorithm.correction.level=token"], "without a bound"),
        (["algorithm.preset=reinforce_pp", "algorithm.uniform_groups=skip"], "equal rewards, which have gradients"),
        (["algorithm.advantage=turn_norm", "algorithm.uniform_groups=skip"], "equal rewards, which have gradients"),
        (["algorithm.advantage=my_advantages:by_length"], "with advantage my_advantages:by_length, skip excludes"),
        (["algorithm.preset=rloo", "algorithm.kl_coef=0.05"], "also from kl_coef"),
        (["algorithm.entropy_coef=0.01"], "also from entropy_coef"),
        (["algorithm.gamma=0.5"], "without advantage: gae or one of turns"),
        (["algorithm.overlong_buffer=0.9"], "has no effect without overlong_penalty"),
        (["task={mix: [{name: a, use: prompts}, {name: b, use: chain_sum}]}"], "the task `prompts` has no rewards"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1"], "gradient of zero"),
        (["algorithm.kl_estimator=k2"], "has no effect without kl_coef"),
        (["algorithm.kl_placement=reward"], "has no effect without kl_coef"),
        (["algorithm.preset=sapo", "algorithm.clip_low=0.1"], "without loss: clip, gspo or cispo"),
        (["algorithm.preset=sapo", "algorithm.clip_high=0.1"], "without loss: clip, gspo or cispo"),
        (["algorithm.preset=sapo", "algorithm.dual_clip=3.0"], "without loss: clip or gspo"),
        (["algorithm.baseline_half_life=2"], "without advantage: running_baseline"),
        ([*SINGLE, "data.filter={}"], "after a single correct rollout"),
        (["algorithm.gae_lambda=0.9"], "without advantage: gae"),
        (["algorithm.sequence_divisor=64"], "without aggregation: sequence_sum"),
    ],
)
def test_choices_without_effect_give_warnings(overrides: list[str], words: str) -> None:
    assert any(words in problem.message for problem in load_spec(QUICKSTART, overrides).warnings)
