"""Marks for tests that need bubblewrap or root, and a run as another user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl_cli.sandbox import bubblewrap
from asyncrl_cli.sandbox.trial import problem

_PROBLEM = problem("bubblewrap")
NEEDS_BUBBLEWRAP = pytest.mark.skipif(bool(_PROBLEM), reason=f"no sandbox here: {_PROBLEM}")
NEEDS_ROOT = pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root, to be another user"
)


def run_as_ordinary_user(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a user who owns no files. Skips the test if that user cannot read the repository."""
    # That user may not enter root's folders, where Python may be, so Python is mounted at an accessible place.
    repository, packages = Path(__file__).parents[2], ":".join(bubblewrap.packages())
    command = f'mount --bind {sys.base_prefix} /mnt && exec "$@"'
    as_user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    python = f"/mnt/bin/{Path(sys.executable).resolve().name}"
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", command, "sh", *as_user, python, "-c", script, *words],
        env={"PYTHONPATH": f"{repository}:{packages}", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    if any(word in result.stderr for word in ("mount:", "unshare:", "Permission denied", "No module named 'tests'")):
        pytest.skip(f"cannot be tried here: {result.stderr.strip().splitlines()[-1]}")
    return result
