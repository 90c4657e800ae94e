"""Running a program as several trainer ranks, without Ray."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path


def run_ranks(program: str, folder: Path, overrides: tuple[str, ...], *arguments: object) -> None:
    """Run `python PROGRAM FOLDER/rank-N.pt N PORT ARGUMENTS... OVERRIDES...` for every rank that the overrides want.

    The program lies in this folder. Fails with the output of the first rank that fails.
    """
    ranks = next(int(item.partition("=")[2]) for item in reversed(overrides) if item.startswith("trainer.ranks="))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        command = [sys.executable, Path(__file__).with_name(program), folder / f"rank-{rank}.pt", rank, port]
        processes.append(
            subprocess.Popen(
                [str(part) for part in (*command, *arguments, *overrides)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        for process in processes:
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, output[-3000:]
    finally:
        for process in processes:
            process.kill()
