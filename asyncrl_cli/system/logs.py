"""Log files: the output of each process of a run goes to ``logs/NAME.log``."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

LOG_BYTES = 16 * 2**20
"""Size at which ``bound_log`` begins a new log."""


def writable_folder(folder: Path) -> Path:
    """Make a folder for logs. If this user may not write there, return a temporary folder, which stays."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK, effective_ids=True):
            return folder
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}-logs-"))


def redirect_output(log_dir: str, name: str) -> None:
    """Append stdout and stderr of this process and its children to a log file.

    Only the owner can read it: libraries may print secrets (vLLM prints its arguments).
    """
    path = Path(log_dir) / f"{name}.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed before Python started
            stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def bound_log() -> None:
    """If this process's log is full, keep it as NAME.log.1 (replacing an earlier one), and begin a new log.

    For processes that run the user's code, which may print without end.
    """
    with suppress(OSError):
        if os.fstat(1).st_size < LOG_BYTES or (log := Path(os.readlink("/proc/self/fd/1"))).suffix != ".log":
            return
        os.replace(log, f"{log}.1")
        redirect_output(str(log.parent), log.stem)
        os.write(1, f"[asyncrl: the output before this is in {log.name}.1]\n".encode())
