"""Files and folders appear complete or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl_cli.core.files import atomic_folder, atomic_write


def test_a_regular_file_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    with atomic_write(path) as file:
        file.write(b"first")
        assert not path.exists()
    with pytest.raises(TypeError), atomic_write(path) as file:
        file.writelines([b"half", "text"])  # type: ignore[list-item]
    assert path.read_bytes() == b"first"
    assert [found.name for found in path.parent.iterdir()] == ["report.html"]
    with atomic_write(path) as file:
        file.write(b"second")
    assert path.read_bytes() == b"second"


def test_a_folder_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "model"
    with pytest.raises(TypeError), atomic_folder(path) as folder:
        (folder / "half").write_bytes("text")  # type: ignore[arg-type]
    assert not list(path.parent.iterdir())
    with atomic_folder(path) as folder:
        (folder / "weights").touch()
        assert not path.exists()
    with pytest.raises(OSError, match="not empty"), atomic_folder(path) as folder:
        (folder / "other").touch()
    assert [found.relative_to(path.parent).as_posix() for found in path.parent.rglob("*")] == ["model", "model/weights"]


KILLED = """
import os, sys
from pathlib import Path
from asyncrl_cli.core.files import atomic_folder
with atomic_folder(Path(sys.argv[1])) as folder:
    (folder / "weights").touch()
    os._exit(1)
"""


def test_a_folder_that_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "model[1]"
    subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    (left,) = tmp_path.iterdir()
    other, own = tmp_path / f"{left.name}0", tmp_path / ".model[1]-mine"
    other.mkdir()
    own.mkdir()
    with atomic_folder(tmp_path / "other") as first, atomic_folder(tmp_path / "other") as second:
        assert first.is_dir() and second.is_dir(), "a folder in use stays"
        assert left.is_dir(), "it is for another target"
    with atomic_folder(path):
        assert not left.exists()
    assert sorted(tmp_path.iterdir()) == sorted([path, other, own, tmp_path / "other"])
