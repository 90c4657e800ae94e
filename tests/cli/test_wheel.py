"""The wheel is complete: everything that commands need at run time is in it, not only in the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, outside the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = folder.glob("asyncrl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def _asyncrl(installed: Path, folder: Path, *arguments: str) -> str:
    program = "from asyncrl_cli.cli.app import console_script as run; import asyncrl_cli, sys; "
    program += f"assert asyncrl_cli.__file__.startswith({str(installed)!r}), asyncrl_cli.__file__; sys.exit(run())"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_template_is_copied_and_valid(installed: Path, tmp_path: Path) -> None:
    listed = _asyncrl(installed, tmp_path, "init", "--list")
    assert "reward-function" in listed and "kuberay" in listed
    _asyncrl(installed, tmp_path, "init", "reward-function", "mine")
    assert (tmp_path / "mine/spec.schema.json").is_file()
    assert "valid" in _asyncrl(installed, tmp_path, "validate-spec", "mine/spec.yaml")


def test_every_template_and_page_is_in_the_wheel(installed: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "templates", "asyncrl_cli"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert tracked
    for path in tracked:
        inside = path.replace("templates/", "asyncrl_cli/_templates/", 1) if path.startswith("templates/") else path
        assert (installed / inside).is_file(), path
