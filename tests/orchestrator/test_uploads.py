"""Checkpoints are uploaded during a run. The journal has each result, and training is never delayed."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from threading import Event

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
from asyncrl_cli.runs.checkpoints import checkpoint_name, seal
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import CheckpointSpec


class Driver:
    """A run with a real journal. It uploads checkpoints like the driver; each call stands for a process."""

    def __init__(self, folder: Path, target: str) -> None:
        self.run = RunDirectory.create(folder, "test")
        self.target = target
        self.warnings: list[str] = []

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
        await uploads.finish()
        self.still = set(uploads.waiting)
        await buffer.close()

    def recorded(self) -> dict[int, str]:
        """`done` or the reason of the failure, by step."""
        with reading(self.run.path / FILE) as connection:
            rows = history.checkpoints(connection)
        return {row.after_step: row.upload_failure or ("done" if row.uploaded_at else "-") for row in rows}


def blocked(folder: Path) -> Driver:
    """A driver with a file in the place of the folder for its copies."""
    (folder / "copies").write_text("")
    return Driver(folder, f"file://{folder}/copies")


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


def test_upload_that_fails_again_in_the_same_way_warns_once(tmp_path: Path) -> None:
    driver = blocked(tmp_path)
    driver.save(2, 4, 6)
    assert sorted(driver.recorded()) == [2, 4, 6]
    assert [warning.partition(" was not")[0][-1] for warning in driver.warnings] == ["2", "4", "6"]


def test_a_resume_uploads_what_an_earlier_driver_could_not(tmp_path: Path) -> None:
    driver = blocked(tmp_path)
    driver.save(2)
    assert "File exists" in driver.recorded()[2] or "Not a directory" in driver.recorded()[2]
    assert len(driver.warnings) == 1 and "the checkpoint of step 2 was not uploaded" in driver.warnings[0]
    (tmp_path / "copies").unlink()
    driver.save()
    assert driver.recorded() == {2: "done"}
    driver.save()
    assert driver.still == set(), "nothing is uploaded, so no checkpoint has to wait"


def test_a_damaged_checkpoint_is_not_uploaded(tmp_path: Path) -> None:
    driver = blocked(tmp_path)
    driver.save(2)
    (tmp_path / "copies").unlink()
    (driver.run.path / "checkpoints/step-000002/state/shard").write_bytes(b"x" * 1000)
    driver.save()
    assert "the checkpoint is damaged: state/shard" in driver.recorded()[2]
    assert not (tmp_path / "copies").exists()


def test_a_checkpoint_that_was_deleted_meanwhile_is_not_called_damaged(tmp_path: Path) -> None:
    driver = blocked(tmp_path)
    driver.save(2, 4)
    (tmp_path / "copies").unlink()
    driver.warnings.clear()

    def delete_second(folder: Path, url: str) -> None:
        shutil.rmtree(driver.run.path / "checkpoints" / checkpoint_name(4), ignore_errors=True)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(subject, "copy", delete_second)
        driver.save()
    assert driver.warnings == [] and driver.recorded()[2] == "done"


def test_a_run_ends_while_an_upload_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = Event()
    monkeypatch.setattr(subject, "LIMIT_S", 0.3)
    monkeypatch.setattr(subject, "copy", lambda folder, url: released.wait(60))
    driver = Driver(tmp_path, "file:///copies")
    try:
        driver.save(2)
    finally:
        released.set()
    assert any("not done after 0 s for steps 2" in warning for warning in driver.warnings)


def test_a_copy_of_the_step_from_before_does_not_make_a_begun_copy_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "step"
    folder.mkdir()
    for name in ("shard", "files.json"):
        (folder / name).write_text("{}")
    subject.copy(folder, "memory://again")
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.put_file", refuse)
    subject.copy(folder, "memory://again")
    assert fsspec.filesystem("memory").exists("/again/shard"), "the complete copy stays"
    (folder / "files.json").write_text("{ }")
    with pytest.raises(OSError, match="full"):
        subject.copy(folder, "memory://again")
    assert not fsspec.filesystem("memory").exists("/again/files.json")


def refuse(*_: object) -> None:
    raise OSError("full")


def test_a_url_that_fsspec_cannot_write_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="fsspec cannot write nowhere:// here") as refused:
        check_upload(spec(checkpoints={"upload": "nowhere://bucket/x"}))
    assert refused.value.location == "checkpoints.upload"
    assert check_upload(spec(checkpoints={"upload": "memory://x"})) == "memory://"
