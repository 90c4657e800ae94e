"""Runs as experiments: an end in epochs, and the next run from the model."""

from __future__ import annotations

import pytest

from asyncrl_cli import load_run
from tests.e2e.conftest import Runs

pytestmark = [pytest.mark.stack, pytest.mark.rotating]


def test_a_run_of_one_epoch_ends_after_it_and_its_model_can_be_trained_on(shared_runs: Runs) -> None:
    ended = shared_runs.run(
        "train",
        shared_runs.write_spec(
            name="first",
            data={"train": {"size": 30}},
            checkpoints={"every": 2, "keep_last": 3},
            stop={"steps": None, "epochs": 1},
        ),
    )
    assert ended.code == 0, ended.out + ended.err + shared_runs.logs()
    assert "4 steps of 8 × 8 rollouts" in ended.out

    run = load_run(shared_runs.newest())
    assert list(run.metrics["step"]) == [1, 2, 3, 4] and set(run.rollouts["step"].dropna()) == {1, 2, 3, 4}
    trained = run.groups[run.groups["state"] == "taken"]
    assert len(trained) == 32 and trained["uid"].nunique() == 30, "30 prompts, and 2 of the next pass"
    assert "<eos>" in run.text(int(trained["group"].iloc[0]))
    listed = shared_runs.run("checkpoint", "list", str(run.path))
    assert [line.split()[0] for line in listed.out.splitlines()[1:]] == ["2", "4"], listed.out

    spec = shared_runs.write_spec(name="second", model={"path": str(run.path / "model")})
    checked = shared_runs.run("train", spec, "--dry-run")
    assert checked.code == 0, checked.out + checked.err
