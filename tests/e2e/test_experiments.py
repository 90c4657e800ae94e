"""Runs as experiments: an end in epochs, copies of checkpoints, and the next run from the model."""

from __future__ import annotations

import pytest

from asyncrl_cli.journal.schema import FILE, reading
from tests.e2e.conftest import Runs

pytestmark = [pytest.mark.stack, pytest.mark.rotating]


def test_a_run_of_one_epoch_uploads_its_checkpoints_and_its_model_can_be_trained_on(shared_runs: Runs) -> None:
    copies, tried = shared_runs.folder / "copies", shared_runs.folder / "tried"
    ended = shared_runs.run(
        "train",
        shared_runs.write_spec(
            name="first",
            data={"train": {"size": 30}},
            checkpoints={
                "every": 2,
                "keep_last": 3,
                # Fails at the first checkpoint, whose upload is then done after the second.
                "upload": f"test -e {tried} || {{ touch {tried}; exit 3; }}; mkdir -p {copies} && "
                f"cp -r $ASYNCRL_CHECKPOINT {copies}/",
            },
            stop={"steps": None, "epochs": 1},
        ),
    )
    assert ended.code == 0, ended.out + ended.err + shared_runs.logs()
    assert "4 steps of 8 × 8 rollouts" in ended.out
    warning = "checkpoints.upload: the checkpoint of step 2 was not uploaded: the command ended with 3"
    assert warning in ended.out + ended.err

    run = shared_runs.newest()
    with reading(run / FILE) as journal:
        trained = journal.execute("SELECT step, uid FROM groups WHERE state = 'taken'").fetchall()
    assert {step for step, _ in trained} == {0, 1, 2, 3}
    assert len(trained) == 32 and len({uid for _, uid in trained}) == 30, "30 prompts, and 2 of the next pass"
    listed = shared_runs.run("checkpoint", "list", str(run))
    assert [line.split()[-3] for line in listed.out.splitlines()[1:]] == ["done", "done"], listed.out
    for step in (2, 4):
        name = f"step-{step:06d}/files.json"
        assert (copies / name).read_bytes() == (run / "checkpoints" / name).read_bytes()

    spec = shared_runs.write_spec(name="second", model={"path": str(run / "model")})
    checked = shared_runs.run("train", spec, "--dry-run")
    assert checked.code == 0, checked.out + checked.err
