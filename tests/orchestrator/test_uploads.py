"""Checkpoints are uploaded during a run. The journal has each result, and training is never delayed."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from stand_ins import spec

from asyncrl_cli.checks.services import check_upload
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.journal import history
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.journal.schema import FILE, reading
from asyncrl_cli.orchestrator import uploads as subject
from asyncrl_cli.orchestrator.uploads import Uploads
from asyncrl_cli.records.groups import BufferSettings
from asyncrl_cli.runs.checkpoints import checkpoint_name, keep_reasons, seal
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import CheckpointSpec


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Driver:
    """A run with a real journal. It uploads checkpoints like the driver; each call stands for a process."""

    def __init__(self, folder: Path, target: str) -> None:
        self.run = RunDirectory.create(folder, "test")
        self.target = target
        self.warnings: list[str] = []
        self.started: Path | None = None

    def save(self, *steps: int) -> None:
        asyncio.run(self._save(steps))

    async def _save(self, steps: tuple[int, ...]) -> None:
        buffer, _ = await Buffer.open(self.run.path / FILE, BufferSettings.from_spec(spec()), "train", limit_s=60.0)
        uploads = Uploads(CheckpointSpec(upload=self.target), self.run, buffer, self.warnings.append)
        uploads.begin()
        for step in steps:
            folder = self.run.path / "checkpoints" / checkpoint_name(step)
            (folder / "state").mkdir(parents=True)
            (folder / "state/shard").write_bytes(b"%d" % step * 1000)
            (folder / "run.json").write_text(json.dumps({"step": step}))
            seal(folder)
            await buffer.checkpointed(step, folder.name, 0.1, 0.0)
            uploads.begin()
            assert step in uploads.waiting
        self.jobs = uploads._background
        if self.started is not None:  # Ctrl-C during the first upload
            await asyncio.to_thread(until, self.started.exists)
            return
        await uploads.finish()
        self.still = set(uploads.waiting)
        await buffer.close()

    def recorded(self) -> dict[int, str]:
        """`done` or the reason of the failure, by step."""
        with reading(self.run.path / FILE) as connection:
            rows = history.checkpoints(connection)
        return {row.after_step: row.upload_failure or ("done" if row.uploaded_at else "-") for row in rows}


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_each_checkpoint_is_copied_to_the_url_and_recorded(tmp_path: Path, scheme: str) -> None:
    url = f"{scheme}://{tmp_path}/copies"
    driver = Driver(tmp_path, url)
    driver.save(2, 4)
    assert driver.recorded() == {2: "done", 4: "done"} and driver.warnings == [] and driver.still == set()
    files, root = fsspec.core.url_to_fs(url)
    for step in (2, 4):
        folder = driver.run.path / "checkpoints" / checkpoint_name(step)
        for path in (path for path in folder.rglob("*") if path.is_file()):
            copied = f"{root}/{driver.run.run_id}/{folder.name}/{path.relative_to(folder)}"
            assert files.cat_file(copied) == path.read_bytes()
    assert files.exists(f"{root}/{driver.run.run_id}/step-000004/files.json")


def test_a_command_gets_the_checkpoint_and_is_repeated_after_the_next_one(tmp_path: Path) -> None:
    marker, copies = shlex.quote(str(tmp_path / "tried")), tmp_path / "copies"
    command = f"test -e {marker} || {{ touch {marker}; echo full >&2; exit 3; }}; "
    command += f"mkdir -p {copies} && cp -r $ASYNCRL_CHECKPOINT {copies}/$ASYNCRL_RUN_ID-$ASYNCRL_STEP"
    driver = Driver(tmp_path, command)
    driver.save(2)
    assert driver.recorded() == {2: "the command ended with 3; its output is in logs/upload.log"}
    assert len(driver.warnings) == 1 and "the checkpoint of step 2 was not uploaded" in driver.warnings[0]
    assert (driver.run.path / "logs/upload.log").read_text() == "full\n"
    driver.save(4)
    assert driver.recorded() == {2: "done", 4: "done"}
    assert {path.name for path in copies.iterdir()} == {f"{driver.run.run_id}-{step}" for step in (2, 4)}


def test_upload_that_fails_again_in_the_same_way_warns_once(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "exit 1")
    driver.save(2, 4, 6)
    assert sorted(driver.recorded()) == [2, 4, 6]
    assert [warning.partition(" was not")[0][-1] for warning in driver.warnings] == ["2", "4", "6"]


def test_a_resume_uploads_what_an_earlier_driver_could_not(tmp_path: Path) -> None:
    (tmp_path / "copies").write_text("a file in the folder's place")
    driver = Driver(tmp_path, f"file://{tmp_path}/copies")
    driver.save(2)
    assert "File exists" in driver.recorded()[2] or "Not a directory" in driver.recorded()[2]
    (tmp_path / "copies").unlink()
    driver.save()
    assert driver.recorded() == {2: "done"}
    driver.save()
    assert driver.still == set(), "nothing is uploaded, so no checkpoint has to wait"


def test_a_damaged_checkpoint_is_not_uploaded(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "exit 1")
    driver.save(2)
    (driver.run.path / "checkpoints/step-000002/state/shard").write_bytes(b"x" * 1000)
    driver.target = f"file://{tmp_path}/copies"
    driver.save()
    assert "the checkpoint is damaged: state/shard" in driver.recorded()[2]
    assert not (tmp_path / "copies").exists()


def test_a_hanging_command_is_ended_and_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "LIMIT_S", 0.3)
    driver = Driver(tmp_path, "sleep 1000")
    driver.save(2)
    assert any("not done after 0 s for steps 2" in warning for warning in driver.warnings)


def test_a_checkpoint_is_kept_until_its_upload_ends() -> None:
    reasons = keep_reasons([2, 4, 6], {}, CheckpointSpec(keep_last=1), uploading=(2,))
    assert reasons == {2: ("upload running",), 4: (), 6: ("last 1",)}


def test_a_url_that_fsspec_cannot_write_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="fsspec cannot write nowhere:// here") as refused:
        check_upload(spec(checkpoints={"upload": "nowhere://bucket/x"}))
    assert refused.value.location == "checkpoints.upload"
    assert check_upload(spec(checkpoints={"upload": "memory://x"})) == "memory://"
    assert "no program" in str(check_upload(spec(checkpoints={"upload": "no-such-program $ASYNCRL_CHECKPOINT"})))


def test_no_upload_begins_after_ctrl_c_ends_a_hanging_one(tmp_path: Path) -> None:
    driver = Driver(tmp_path, f"echo $$ >> {tmp_path}/started; exec sleep 1000")
    driver.started = tmp_path / "started"
    driver.save(2, 4)
    (shell,) = map(int, driver.started.read_text().split())
    os.kill(shell, signal.SIGKILL)
    assert driver.jobs.wait(60)
    assert driver.started.read_text() == f"{shell}\n"
