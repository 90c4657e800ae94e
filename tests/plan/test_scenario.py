"""The calibration run and the scenario of a spec."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from asyncrl_cli.cli.plan import calibration_overrides, calibration_run
from asyncrl_cli.core.errors import RunError
from asyncrl_cli.runs.directory import RunDirectory
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


def test_a_calibration_run_is_in_the_given_folder_of_runs(tmp_path: Path) -> None:
    with (
        patch("asyncrl_cli.cli.output.start_checks"),
        patch.object(RunDirectory, "create", side_effect=RunError("not started")) as create,
        pytest.raises(RunError, match="not started"),
    ):
        calibration_run(QUICKSTART, [], tmp_path)
    create.assert_called_once_with(tmp_path, "quickstart-calibration")
