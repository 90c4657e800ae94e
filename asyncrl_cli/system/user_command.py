"""Runs a user's shell command, which for example copies a checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

COMMAND = "ASYNCRL_COMMAND"


def run_command(command: str, environment: Mapping[str, str], log: Path, limit_s: float) -> None:
    """Run a command to its end; its output is appended to ``log``.

    After ``limit_s`` seconds its processes are killed. Raises ``TimeoutError`` then, and ``OSError`` if it fails.
    """
    log.parent.mkdir(exist_ok=True)
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:  # it may print a secret
        process = subprocess.Popen(
            ["sh", "-c", f'eval "${COMMAND}"'],  # not in the arguments, which every user of the machine can read
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**environment, COMMAND: command},
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise TimeoutError(f"the command took more than {limit_s:.0f} s and was ended") from None
    if process.returncode:
        raise OSError(f"the command ended with {process.returncode}; its output is in {log.parent.name}/{log.name}")
