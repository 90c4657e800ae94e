"""Temporary folders of worker processes are removed after their owner's death, and not before."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from asyncrl_cli.workers.process import UNLOCKED, WorkerFolder, remove_abandoned

OWNER = """
import sys
from asyncrl_cli.workers.process import WorkerFolder
folder = WorkerFolder()
(folder.path / "file").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_killed_owner_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"{UNLOCKED}x").mkdir()
    (tmp_path / "asyncrl-work-link").symlink_to(tmp_path / f"{UNLOCKED}x")
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        mine = WorkerFolder()
        assert (theirs / "file").exists(), "its owner lives"
        owner.kill()
        owner.wait()
    assert theirs.exists()
    other = WorkerFolder()
    assert not theirs.exists() and mine.path.exists()
    for folder in (mine, other):
        folder.remove()
    remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{UNLOCKED}x", "asyncrl-work-link"]
