"""Bad runs have the right findings within three steps of their cause, and good runs have none."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.inspect.health import HealthWatch, health, teaching_groups

SPEC: dict[str, Any] = {
    "algorithm": {"advantage": "group_norm", "uniform_groups": "skip", "reward_coef": 1.0},
    "trainer": {"dtype": "float32"},
    "rollout": {"dtype": "float32", "group_size": 8, "max_response_tokens": 192},
    "pipeline": {"groups_per_step": 32},
}
HEALTHY = {
    "reward/mean": 0.5,
    "reward/std": 0.5,
    "reward/correct": 0.5,
    "reward/uniform_groups": 0.25,
    "response/tokens_mean": 25.0,
    "response/truncated_ratio": 0.0,
    "response/unknown_tokens": 0.0,
    "train/updates": 1.0,
    "train/updates_skipped": 0.0,
    "train/gradient_norm": 0.2,
    "train/entropy": 0.2,
    "correction/kl_behaviour": 0.002,
    "correction/importance_capped_fraction": 0.001,
    "correction/importance_masked_fraction": 0.0,
    "correction/rejected_token_fraction": 0.0,
    "engine/logprob_gap_mean": 3e-7,
    "engine/logprob_gap_max": 2e-5,
}
IDLE = {name: None for name in HEALTHY if name.startswith(("train/g", "train/e", "correction/"))} | {
    "train/updates": 0.0
}
"""A step without an update has no metrics of one."""
CAUSE = 6
"""The first step with a simulated cause."""

Changes = dict[str, float | None]
Metrics = dict[str, float]


def steps(count: int, changes: Callable[[int], Changes] = lambda step: {}) -> list[Metrics]:
    """Healthy steps, changed step by step; None removes a metric."""
    changed = ({"step": step} | HEALTHY | changes(step) for step in range(1, count + 1))
    return [{name: value for name, value in row.items() if value is not None} for row in changed]


def from_cause(bad: Changes) -> Callable[[int], Changes]:
    return lambda step: bad if step >= CAUSE else {}


def spec(**sections: dict[str, Any]) -> dict[str, Any]:
    return SPEC | {name: SPEC.get(name, {}) | keys for name, keys in sections.items()}


def rewards(mean: float, std: float | None = None, uniform: float = 0.25, correct: float | None = None) -> Changes:
    """Rewards of 0 and 1, unless ``std`` or ``correct`` say otherwise."""
    deviation = math.sqrt(mean * (1 - mean)) if std is None else std
    share = mean if correct is None else correct
    return {"reward/mean": mean, "reward/std": deviation, "reward/correct": share, "reward/uniform_groups": uniform}


TRAIN_ALL = spec(algorithm={"uniform_groups": "train"})
GAE = spec(algorithm={"advantage": "gae", "uniform_groups": "train", "critic": {"warmup_steps": 4}})
EQUAL = "equal_groups"
BAD: dict[str, tuple[str, str, dict[str, Any], Changes]] = {
    # run: rule, key in the remedy, spec, changes from CAUSE on
    "constant reward": (EQUAL, "data.train", SPEC, IDLE | rewards(0.5, std=0.0, uniform=1.0, correct=0.0)),
    "no response is right": (EQUAL, "data.train", SPEC, IDLE | rewards(0.0, uniform=1.0)),
    "one reward for each prompt": (EQUAL, "data.train", SPEC, IDLE | rewards(0.5, uniform=1.0)),
    "equal groups are trained": (
        EQUAL,
        "data.train",
        TRAIN_ALL,
        rewards(0.5, uniform=1.0) | {"train/gradient_norm": 0},
    ),
    "equal groups with a KL penalty": (EQUAL, "data.train", TRAIN_ALL, rewards(0.5, uniform=1.0)),
    "constant reward with a critic": (EQUAL, "data.train", GAE, rewards(0.5, std=0.0, uniform=1.0, correct=0.0)),
    "small batches": (EQUAL, "data.train", spec(pipeline={"groups_per_step": 4}), IDLE | rewards(0.3, uniform=1.0)),
    "every reward is None": ("no_updates", "masked_rollouts", SPEC, IDLE),
    "zero gradient": ("no_updates", "algorithm.advantage", SPEC, {"train/gradient_norm": 0.0}),
    "no finite update": ("updates_skipped", "learning_rate", SPEC, IDLE | {"train/updates_skipped": 1.0}),
    "short limit": ("truncated_responses", "max_response_tokens", SPEC, {"response/truncated_ratio": 0.97}),
    "another tokenizer": ("unknown_tokens", "tokenizer", SPEC, {"response/unknown_tokens": 0.01}),
    "learning rate 0.3": ("policy_moved", "learning_rate", SPEC, {"correction/kl_behaviour": 3.6}),
    "wrong engine": ("logprob_gap", "engine_args", SPEC, {"engine/logprob_gap_max": 0.02}),
    "coarse engine": (
        "logprob_gap",
        "rollout.dtype",
        spec(rollout={"dtype": "bfloat16"}),
        {"engine/logprob_gap_mean": 0.03},
    ),
    "FP8 engine": (
        "logprob_gap",
        "rollout.engine_args.quantization",
        spec(rollout={"dtype": "bfloat16", "engine_args": {"quantization": "fp8_per_tensor"}}),
        {"engine/logprob_gap_mean": 0.03},
    ),
    "capped weights": ("limited_weights", "staleness", SPEC, {"correction/importance_capped_fraction": 0.2}),
    "masked weights": ("limited_weights", "staleness", SPEC, {"correction/importance_masked_fraction": 0.8}),
    "rejected sequences": ("limited_weights", "staleness", SPEC, {"correction/rejected_token_fraction": 0.9}),
    "temperature 0.01": ("entropy", "temperature", SPEC, {"train/entropy": 0.001}),
    "collapse": ("reward_fell", "learning_rate", SPEC, rewards(0.05)),
    "collapse of other rewards": ("reward_fell", "learning_rate", SPEC, rewards(-9.0, std=0.5, correct=0.0)),
}


@pytest.mark.parametrize("run", BAD)
def test_a_bad_run_is_found_within_three_steps_and_named_with_its_key(run: str) -> None:
    rule, key, run_spec, bad = BAD[run]
    before: Changes = rewards(-1.0, std=0.5, correct=0.0) if "other rewards" in run else {}
    simulated = steps(CAUSE + 12, lambda step: bad if CAUSE <= step < CAUSE + 4 else before)
    assert not health(simulated[: CAUSE - 1], run_spec)
    (finding,) = [one for one in health(simulated[: CAUSE + 2], run_spec) if one.rule == rule]
    assert (finding.first_step, finding.last_step) == (CAUSE, None)
    assert key in finding.remedy and finding.observation and finding.cause
    assert f", since step {CAUSE}. Usual cause: " in finding.text
    last = [one for one in health(simulated, run_spec) if one.rule == rule]
    assert last == [replace(finding, last_step=CAUSE + 3)], "it ends once, after the last bad step"


FROM_START: dict[str, tuple[str, dict[str, Any], Changes]] = {
    "no reward": (EQUAL, SPEC, IDLE | rewards(0.0, uniform=1.0)),
    "every response is right": (EQUAL, SPEC, IDLE | rewards(1.0, uniform=1.0)),
    "hardly any reward": ("reward_from_start", SPEC, rewards(0.004, uniform=0.97)),
    "too easy": ("reward_from_start", SPEC, rewards(0.999, uniform=0.97)),
    "no reward for a critic": (EQUAL, spec(algorithm={"advantage": "gae", "uniform_groups": "train"}), rewards(0.0)),
    "short limit": ("truncated_responses", SPEC, {"response/truncated_ratio": 0.3}),
}


@pytest.mark.parametrize("run", FROM_START)
def test_a_run_that_is_bad_from_its_first_step_is_found_after_three(run: str) -> None:
    rule, run_spec, bad = FROM_START[run]
    simulated = steps(3, lambda _: bad)
    assert [(one.rule, one.first_step, one.stops_learning) for one in health(simulated, run_spec)] == [(rule, 1, True)]


def rising(step: int) -> float:
    return min(1.0, 0.2 + 0.05 * step)


GOOD: dict[str, tuple[dict[str, Any], Callable[[int], Changes]]] = {
    "sparse rewards": (SPEC, lambda step: rewards(0.02, uniform=(0.9, 1.0, 0.95)[step % 3])),
    "solved task": (SPEC, lambda step: rewards(rising(step), uniform=rising(step)) | {"train/entropy": 0.2 / step}),
    "solved without updates": (
        SPEC,
        lambda step: (IDLE if step > 20 else {}) | rewards(rising(step), uniform=rising(step)),
    ),
    "random weights": (
        spec(model={"init": {}, "warm_start": None}),
        lambda _: rewards(0.03, std=0.05, correct=0.0) | {"response/truncated_ratio": 0.95},
    ),
    "filter": (spec(data={"filter": {"solved_streak": 1}}), lambda step: rewards(0.9 - 0.7 * (step > 20))),
    "rejected groups": (
        spec(algorithm={"uniform_groups": "reject"}),
        lambda step: rewards(0.8 - 0.6 * (step > 20), uniform=0.0),
    ),
    "metrics as the only rewards": (
        spec(algorithm={"reward_parts": {"brevity": 1.0}}),
        lambda _: rewards(0.0, uniform=0.0) | {"train/gradient_norm": 0.3},
    ),
    "penalty for overlong responses": (
        spec(algorithm={"overlong_penalty": 1.0}),
        lambda _: rewards(1.0, uniform=0.5),
    ),
    "distillation": (
        spec(algorithm={"advantage": "none", "uniform_groups": "train", "reward_coef": 0.0}),
        lambda step: rewards(0.0, uniform=1.0),
    ),
    "critic": (GAE, lambda step: rewards(rising(step), uniform=1.0) | (IDLE if step <= 4 else {})),
    "single rollouts": (
        spec(algorithm={"advantage": "running_baseline", "uniform_groups": "train"}, rollout={"group_size": 1}),
        lambda step: rewards(0.3 + 0.1 * (step % 3), uniform=1.0),
    ),
    "small batches": (
        spec(pipeline={"groups_per_step": 2}),
        lambda step: rewards(0.5, uniform=1.0) | IDLE if step % 5 in (0, 1) else rewards(0.5, uniform=0.5),
    ),
    "bfloat16": (
        spec(trainer={"dtype": "bfloat16"}, rollout={"dtype": "bfloat16"}),
        lambda _: {"engine/logprob_gap_mean": 0.006, "engine/logprob_gap_max": 0.3},
    ),
    "rewards of other scales": (SPEC, lambda step: rewards(-20.0 + 0.5 * step, std=4.0, correct=0.0)),
    "noisy rewards": (spec(pipeline={"groups_per_step": 2}), lambda step: rewards((0.1, 0.5, 0.3, 0.2)[step % 4])),
    "no metrics of the trainer": (SPEC, lambda _: {name: None for name in HEALTHY if "reward/mean" not in name}),
    "publish every 4": (
        spec(pipeline={"groups_per_step": 32, "publish_every": 4}),
        lambda step: {"correction/kl_behaviour": 0.01 * (step % 4)},
    ),
}


@pytest.mark.parametrize("run", GOOD)
def test_a_good_run_has_no_finding(run: str) -> None:
    run_spec, changes = GOOD[run]
    watch = HealthWatch(run_spec, steps(40, changes))
    assert [finding.text for finding in watch.findings] == watch.verdicts == []


RECORDED = Path(__file__).with_name("healthy_steps.csv")
"""Metrics of real runs that learned."""


def test_recorded_runs_that_learned_have_no_finding() -> None:
    with RECORDED.open() as file:
        rows = list(csv.DictReader(file))
    assert len({row["run"] for row in rows}) == 4
    for run in {row["run"] for row in rows}:
        dtypes = {"dtype": "bfloat16" if "bfloat16" in run else "float32"}
        metrics = [
            {name: float(value) for name, value in row.items() if value and name != "run"}
            for row in rows
            if row["run"] == run
        ]
        assert not health(metrics, spec(trainer=dtypes, rollout=dtypes)), run


@pytest.mark.parametrize(
    ("bad", "verdict"),
    [
        (IDLE | rewards(0.5, std=0.0, uniform=1.0), "0 of 64 groups had different rewards: nothing was learned"),
        (IDLE, "no weight changed in 2 steps: nothing was learned"),
    ],
)
def test_even_two_steps_that_taught_nothing_have_a_verdict(bad: Changes, verdict: str) -> None:
    assert HealthWatch(SPEC, steps(2, lambda _: bad)).verdicts == [verdict]


def test_updates_with_equal_rewards_are_not_called_idle() -> None:
    run_spec = spec(algorithm={"advantage": "gae", "uniform_groups": "train"})
    watch = HealthWatch(run_spec, steps(20, lambda _: rewards(0.0, std=0.0)))
    assert watch.verdicts[0] == "all rewards were equal in 20 steps: nothing was learned"


@pytest.mark.parametrize("advantage", ["turn_norm", "running_baseline", "my_advantages:by_length"])
def test_equal_rewards_end_no_run_whose_advantages_compare_something_else(advantage: str) -> None:
    run_spec = spec(algorithm={"advantage": advantage, "uniform_groups": "train"})
    assert HealthWatch(run_spec, steps(60, lambda _: rewards(0.5, std=0.0))).steps_without_learning == 0


def test_a_run_that_stopped_learning_has_a_verdict_before_its_findings() -> None:
    verdicts = HealthWatch(SPEC, steps(12, from_cause(IDLE | rewards(0.0, uniform=1.0)))).verdicts
    assert verdicts[0] == "nothing was learned in steps 6 to 12"
    assert {verdict.rpartition("(")[2] for verdict in verdicts[1:]} == {"equal_groups)", "reward_fell)"}


def test_groups_are_shown_only_where_equal_rewards_teach_nothing() -> None:
    metrics = steps(1)[0]
    assert teaching_groups(metrics, SPEC) == "  teach 24/32"
    assert teaching_groups(metrics, GAE) == ""


names = st.sampled_from(sorted(HEALTHY))
values = st.one_of(st.sampled_from([0.0, 1.0, math.nan, math.inf]), st.floats(-1e3, 1e3))
many_steps = st.lists(st.dictionaries(names, values), max_size=30).map(
    lambda rows: [{"step": float(step), **row} for step, row in enumerate(rows, start=1)]
)


@given(simulated=many_steps, run_spec=st.sampled_from([SPEC, GAE, TRAIN_ALL, {}]))
def test_findings_change_only_in_their_last_step(simulated: list[Metrics], run_spec: dict[str, Any]) -> None:
    watch = HealthWatch(run_spec)
    for count, metrics in enumerate(simulated, start=1):
        before = list(watch.findings)
        changed = watch.step(metrics)
        assert watch.findings[: len(before)] == [
            replace(finding, last_step=now.last_step)
            for finding, now in zip(before, watch.findings[: len(before)], strict=True)
        ]
        assert all(
            old.last_step in (None, new.last_step)
            for old, new in zip(before, watch.findings[: len(before)], strict=True)
        )
        assert all(finding in watch.findings for finding in changed)
        assert all(
            1 <= finding.first_step <= (finding.last_step or count) <= count and "nan" not in finding.text
            for finding in watch.findings
        )
        assert len({finding.rule for finding in watch.open_findings}) == len(watch.open_findings)
    assert health(simulated, run_spec) == watch.findings


@given(
    st.dictionaries(st.sampled_from(sorted(SPEC)), st.sampled_from([None, 3, "x", [], {"group_size": 0, "dtype": 1}]))
)
def test_specs_that_no_run_writes_raise_nothing(sections: dict[str, Any]) -> None:
    equal = HEALTHY | {"reward/uniform_groups": 1.0}
    assert health([HEALTHY] * 3 + [equal] * 20, sections)
