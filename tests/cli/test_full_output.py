"""A command that cannot write its output reports this in one line, and shows no other error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def asyncrl(arguments: str, redirection: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -m asyncrl_cli.cli.app {arguments} {redirection}"
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=folder, timeout=120, check=False)


@pytest.mark.parametrize("arguments", ["--help", "init --list", "validate-spec --schema"])
def test_output_to_a_full_disk_is_an_error_with_a_hint(tmp_path: Path, arguments: str) -> None:
    ended = asyncrl(arguments, "> /dev/full", tmp_path)
    assert ended.returncode == 1
    shown = (
        "error: cannot write the output: No space left on device\n"
        "hint: free disk space, or redirect the output elsewhere\n"
    )
    assert ended.stderr == shown


def test_an_error_that_cannot_be_printed_keeps_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("unknown: 1\n")
    ended = asyncrl("train spec.yaml", "2> /dev/full", tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")


def test_a_closed_pipe_is_not_reported(tmp_path: Path) -> None:
    ended = asyncrl("validate-spec --schema", "| head -c 1 > /dev/null", tmp_path)
    assert ended.stderr == ""
