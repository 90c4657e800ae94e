"""A process between an owner and a command, which ensures that no process of the command outlives it.

It adopts every orphan of the command, also those with a session and an environment of their own. When the command ends,
or the keeper is sent SIGTERM, it kills them all, and ends as the command did.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncrl_cli.system.process_tree import adopt_orphans, die_with, kill_descendants

PACKAGES = Path(__file__).parents[2]
NOT_STARTED = 127
"""Exit status when the command cannot be started, as in a shell."""


def with_keeper(words: Sequence[str]) -> list[str]:
    """The words that start a command with a keeper, which ends with this process."""
    start = f"import sys; sys.path.insert(0, {str(PACKAGES)!r}); from {__name__} import main; main()"
    return [sys.executable, "-I", "-S", "-c", start, str(os.getpid()), *words]


def main() -> None:
    """The keeper: ``OWNER WORD...`` are its arguments."""
    owner, words = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, _end)
    die_with(owner)
    adopt_orphans()
    status = NOT_STARTED
    try:
        status = subprocess.Popen(words, start_new_session=True).wait()
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        finally:  # also when a SIGTERM that came just before raises: from then on it is ignored
            kill_descendants()
    if status < 0:  # the same signal, so that the owner sees how it ended
        with suppress(OSError):  # SIGKILL has no handler; Python ignores SIGPIPE
            signal.signal(-status, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _end(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + signal.SIGTERM)
