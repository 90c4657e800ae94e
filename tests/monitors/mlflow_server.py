"""A real MLflow server that a test can start and stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

START_S = 300.0
"""Seconds that a server may take to answer while runs use all processors."""


class Server:
    """A server on a free port, with its store in ``folder``; it is down until ``start``."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self._port}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and return when it answers."""
        arguments = {
            "--host": "127.0.0.1",
            "--port": self._port,
            "--workers": 1,
            "--backend-store-uri": f"sqlite:///{self._folder}/server.db",
            "--artifacts-destination": self._folder / "artifacts",
        }
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *(str(part) for pair in arguments.items() for part in pair)],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "server.log").read_text()
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.1)

    def stop(self) -> None:
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        """Send a signal to all its processes."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
