"""The keeper kills the processes that its command left, and exits like the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl_cli.system.process_tree import with_keeper
from tests.system.test_reaper import is_alive

LEAVES = """
import os, signal
pids = []
for _ in range(250):
    if (pid := os.fork()) == 0:
        os.setsid()
        signal.pause()
    pids.append(pid)
open(PATH, "w").write(" ".join(map(str, pids)))
"""
"""A command that leaves 250 processes in separate sessions."""


def test_sigterm_while_it_kills_leaves_nothing_behind(tmp_path: Path) -> None:
    left = tmp_path / "left"
    command = [sys.executable, "-S", "-c", LEAVES.replace("PATH", repr(str(left)))]
    keeper = f"""
import os, signal, sys
from asyncrl_cli.system import process_tree as keeper
kill_descendants = keeper.kill_descendants
def interrupted():
    os.kill(os.getpid(), signal.SIGTERM)
    kill_descendants()
keeper.kill_descendants = interrupted
sys.argv = ["keeper", "{os.getpid()}", *{command!r}]
keeper.main()
"""
    subprocess.run([sys.executable, "-c", keeper], check=False, timeout=300)
    pids = [int(word) for word in left.read_text().split()]
    alive = [pid for pid in pids if is_alive(pid)]
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert (len(pids), alive) == (250, [])


@pytest.mark.parametrize("number", [signal.SIGPIPE, signal.SIGKILL, signal.SIGINT])
def test_it_ends_by_the_signal_that_ended_the_command(number: signal.Signals) -> None:
    command = [sys.executable, "-S", "-c", "import os, signal; n = int(os.sys.argv[1]); "
               "n == 9 or signal.signal(n, signal.SIG_DFL); os.kill(os.getpid(), n)", str(int(number))]  # fmt: skip
    assert subprocess.run(with_keeper(command), check=False, timeout=300).returncode == -number
