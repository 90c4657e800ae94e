"""A process that the reward function has to itself: whatever the function does, the process's owner goes on.

    RewardProcess  <- a socket ->  python -m asyncrl_cli.tasks.reward_process DESCRIPTOR OWNER

A thread that hangs cannot be stopped, and one that spins in C with the interpreter's lock held (a regular
expression that backtracks for ever) would stop its own watchdog, too. A process can be killed. The function runs in
its main thread, as functions that set alarms need it.

Invariant: ``RewardProcess.score`` returns within the task's limit and the time that killing a process takes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from asyncrl_cli.runs.parent import die_with
from asyncrl_cli.spec.sections import TaskSpec
from asyncrl_cli.tasks.errors import TaskError
from asyncrl_cli.tasks.load import load_task
from asyncrl_cli.tasks.scoring import Response, RewardFailure, Scored, reward_name, score

START_S = 600.0
"""Seconds that importing and making the task may take."""
EXIT_S = 10.0
"""Seconds that the kernel gets to end a process after SIGKILL."""


class ProcessEnded(Exception):
    """The process ended before it answered; says how."""


class RewardProcess:
    """Starts the process and has it load the task. ``name`` is what the user calls the reward.

    Raises ``TaskError`` when the task cannot be loaded.
    """

    def __init__(self, spec: TaskSpec, search_path: Path) -> None:
        self._limit_s = spec.reward_timeout_s
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # The task is looked for where this process would find it.
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,  # with what it starts itself, it is one group to kill
            )
        self._exit = os.pidfd_open(self._process.pid)
        self._closed = False
        place = f"task.use: {spec.use}"
        try:
            loaded = self._ask((spec, search_path), START_S)
        except ProcessEnded as ended:
            raise TaskError(
                f"loading the task ended its process ({ended})", place=place, mend="logs/scorer.log may say more"
            ) from None
        if loaded is None:
            raise TaskError(
                f"loading the task took more than {START_S:.0f} s", place=place, mend="Make its import faster"
            )
        if isinstance(loaded, TaskError):
            self.close()
            raise loaded
        self.name: str = loaded

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return not self._closed and self._process.poll() is None

    def score(self, response: Response) -> Scored | RewardFailure:
        """The reward of one response; one that takes too long costs the process. Raises ``ProcessEnded``."""
        scored: Scored | RewardFailure | None = self._ask(response, self._limit_s)
        if scored is None:
            return RewardFailure(f"{self.name} took more than {self._limit_s:g} s on prompt {response[0].uid!r}")
        return scored

    def close(self) -> None:
        """Kill the process and whatever it has started."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(EXIT_S)
        self._connection.close()
        os.close(self._exit)

    def _ask(self, question: object, limit_s: float) -> Any:
        """The answer; None when there was none in time. The process is closed then, and when it ended."""
        deadline = time.monotonic() + limit_s
        with contextlib.suppress(OSError, EOFError):  # it has closed the socket
            self._connection.send(question)
            # What it has started may keep the socket open after its end, so that is watched as well.
            if self._connection in wait([self._connection, self._exit], limit_s):
                return self._connection.recv()
        # The socket may close before the process ends; it has the rest of its time to do so with a status of its own.
        ended = wait([self._exit], max(0.0, deadline - time.monotonic()))
        self.close()
        if not ended:
            return None
        raise ProcessEnded(_how(self._process.returncode))


def _how(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def main(descriptor: int, owner_pid: int) -> None:
    """The process: load the task, then score what comes until the owner closes the socket."""
    die_with(owner_pid)
    os.set_inheritable(descriptor, False)
    owner: Connection[Any, Any] = Connection(descriptor)
    spec, search_path = owner.recv()
    try:
        task = load_task(spec, search_path)
    except TaskError as error:
        owner.send(error)
        return
    owner.send(reward_name(task))
    while True:
        try:
            response = owner.recv()
        except EOFError:
            return
        owner.send(score(task, response))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
