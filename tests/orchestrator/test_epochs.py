"""A start converts `stop.epochs` to steps, records them, and shows the warnings that follow from the number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stand_ins import spec

from asyncrl_cli.orchestrator.experiment import Experiment
from asyncrl_cli.records.groups import BufferSettings


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {row}", "answer": "1"}) + "\n" for row in range(21)))
    return path


@pytest.mark.parametrize(
    ("stop", "publish_every", "steps"),
    [
        ({"epochs": 1}, 1, 6),  # 21 prompts in batches of 4
        ({"epochs": 2}, 1, 11),
        ({"epochs": 2}, 3, 12),
        ({"epochs": 2, "steps": 9}, 3, 9),
        ({"epochs": 1, "steps": 9}, 3, 6),
        ({"steps": 9}, 3, 9),
    ],
)
def test_a_start_counts_the_steps_of_its_epochs(
    rows: Path, stop: dict[str, int], publish_every: int, steps: int
) -> None:
    notices: list[str] = []
    made = spec(
        task={"use": "exact"},
        data={"train": {"path": str(rows)}, "eval": None},
        pipeline={"groups_per_step": 4, "publish_every": publish_every},
        trainer={"schedule": {"warmup_updates": 12}},
        stop=stop,
    )
    counted = Experiment.load(made, rows.parent, notices.append).spec
    assert counted.stop.steps == counted.stop.total == BufferSettings.from_spec(counted).total_steps == steps
    assert counted.stop.epochs is None and counted.model_copy(update={"stop": made.stop}) == made
    too_long = "trainer.schedule.warmup_updates: longer than the schedule"
    assert any(too_long in notice for notice in notices) == (steps != stop.get("steps") and steps < 12)
