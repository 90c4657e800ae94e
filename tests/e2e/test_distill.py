"""A student that supervised training on rows has given a bad habit reaches its teacher, by distillation on its own
samples."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import mean

import pytest

from asyncrl_cli.spec.inputs import ModelInit
from asyncrl_cli.train.model.initial import build_initial_model
from tests.small_models import INIT
from tests.spell_backward import SpellBackward

from .conftest import BASE_SPEC, Runs, steps_of

pytestmark = [pytest.mark.stack, pytest.mark.rotating]


SPELLING = {"use": "spell_backward:SpellBackward", "options": {}}


def write_rows(file: Path, careful: float) -> None:
    """Conversations in which a share ``careful`` of the replies is right, and one that is too long."""
    rng = random.Random(0)
    words = [str(prompt.fields["answer"])[::-1] for prompt in SpellBackward().prompts("train", 4000)]
    pairs = [(f"{word}>", word[::-1] if rng.random() < careful else word) for word in words] + [("a>", "a" * 80)]
    chats = [
        [{"role": role, "content": text} for role, text in zip(("user", "assistant"), p, strict=True)] for p in pairs
    ]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def test_a_student_reaches_its_teacher_without_rewards(shared_runs: Runs) -> None:
    build_initial_model(ModelInit(**INIT), BASE_SPEC["model"]["max_length"], 0, shared_runs.folder / "saved")
    for name, careful in (("teacher", 1.0), ("student", 0.3)):
        write_rows(shared_runs.folder / f"{name}.jsonl", careful)
    skilled, habit = (
        {
            "path": "./saved",
            "warm_start": {
                "steps": 350,
                "data": {"path": f"{name}.jsonl", "prompt_column": "messages"},
                "batch_size": 24,
                "learning_rate": 3.0e-3,
                "schedule": {"kind": "cosine", "warmup_updates": 30},
            },
        }
        for name in ("teacher", "student")
    )
    teacher = shared_runs.train(name="teacher", model=skilled, task=SPELLING, stop={"steps": 0}) / "model"
    ended = shared_runs.succeed(
        "train",
        shared_runs.write_spec(
            name="student",
            model=habit,
            task=SPELLING,
            algorithm={"preset": "distill", "reference_path": str(teacher)},
            rollout={"group_size": 2},
            pipeline={"groups_per_step": 32},
            stop={"steps": 100},
        ),
    )
    assert "warm start on 4,000 rows; 1 is too long" in ended.out
    run = shared_runs.newest()
    divergence = [row["train/kl_reference"] for row in steps_of(run)]
    assert mean(divergence[-10:]) < 0.25 * mean(divergence[:5])
    state = json.loads((run / "state.json").read_text())
    assert state["accuracy_before"]["greedy"] < 0.2 < 0.7 < state["accuracy"]["greedy"]
