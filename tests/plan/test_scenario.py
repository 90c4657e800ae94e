"""The calibration run and the scenario of a spec."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl_cli.cli.plan import calibration_overrides
from asyncrl_cli.spec.load import load_spec

QUICKSTART = Path(__file__).parents[2] / "specs/quickstart.yaml"


@pytest.mark.parametrize(
    ("overrides", "groups", "steps"),
    [
        (["pipeline.publish_every=4", "stop.steps=400"], 32, 84),
        (["trainer.minibatches=8", "trainer.ranks=8"], 8, 28),
        (["algorithm={preset: ppo, critic: {warmup_steps: 50}}", "stop.steps=400"], 32, 28),
    ],
)
def test_a_valid_spec_can_be_calibrated(overrides: list[str], groups: int, steps: int) -> None:
    evaluated = ["evaluation.sets={more: {data: {size: 2}, every: 4}}", "checkpoints.upload=memory://copies"]
    overrides = ["pipeline.max_staleness=4", "pipeline.groups_per_step=32", *evaluated, *overrides]
    changes = calibration_overrides(load_spec(QUICKSTART, overrides).spec)
    calibration = load_spec(QUICKSTART, [*overrides, *changes]).spec
    assert (calibration.pipeline.groups_per_step, calibration.stop.steps) == (groups, steps)
    assert (calibration.evaluation.sets, calibration.data.eval, calibration.checkpoints.upload) == ({}, None, None)
