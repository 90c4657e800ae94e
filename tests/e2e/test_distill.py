"""A student that starts with a bad habit reaches its teacher, by distillation on its own samples."""

from __future__ import annotations

import json
from statistics import mean

import pytest

from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.train.model.initial import prepare_model
from tests.spell_backward import SpellBackward

from .conftest import BASE_SPEC, Runs, rows

pytestmark = pytest.mark.stack


def test_a_student_reaches_its_teacher_without_rewards(shared_runs: Runs) -> None:
    skilled = {**BASE_SPEC["model"], "warm_start": {"steps": 350, "clean_fraction": 1.0}}
    spec = load_spec(str(shared_runs.write_spec(name="teacher", model=skilled))).spec
    teacher = prepare_model(spec, SpellBackward, lambda *_: None)
    run = shared_runs.train(
        name="student",
        algorithm={"preset": "distill", "reference_path": str(teacher)},
        rollout={"group_size": 2},
        pipeline={"groups_per_step": 32},
        stop={"steps": 80},
    )
    divergence = [row["train/kl_reference"] for row in rows(run, "metrics.jsonl")]
    assert mean(divergence[-10:]) < 0.25 * mean(divergence[:5])
    state = json.loads((run / "state.json").read_text())
    assert state["accuracy_before"]["greedy"] < 0.2 < 0.7 < state["accuracy"]["greedy"]
