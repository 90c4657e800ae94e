"""The peak memory of a run: of each GPU as reported by its driver, or of the machine for a run on CPUs."""

from __future__ import annotations

import subprocess
import threading
from types import TracebackType
from typing import Self

import psutil

EVERY_S = {"cuda": 0.5, "cpu": 2.0}
"""Seconds between two samples. On CPUs each sample reads the page tables of every process."""


class PeakMemory:
    """Samples the memory in a thread until the block ends.

    Attributes:
        bytes: the largest sum so far, by device: `GPU 0`, ..., or `processes` (the run's processes, with shared pages
            counted once).
    """

    def __init__(self, device: str) -> None:
        self.bytes: dict[str, int] = {}
        self._device = device
        self._pid: int | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def watch(self, pid: int) -> None:
        """Set the process of the run's driver; on CPUs all other processes of the run are its descendants."""
        self._pid = pid
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(EVERY_S[self._device]):
            used = gpu_memory() if self._device == "cuda" else {"processes": tree_memory(self._pid)}
            for name, size in used.items():
                self.bytes[name] = max(size, self.bytes.get(name, 0))


def gpu_memory(field: str = "memory.used") -> dict[str, int]:
    """Bytes of each GPU by nvidia-smi: used by any process, or with ``memory.total`` all."""
    command = ["nvidia-smi", f"--query-gpu=index,{field}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    pairs = (line.split(",") for line in answer.splitlines())
    return {f"GPU {index.strip()}": int(mebibytes) * 2**20 for index, mebibytes in pairs}


def tree_memory(pid: int | None) -> int:
    """Bytes of a process and its descendants; shared pages are counted once."""
    total = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has ended
            continue
    return total
