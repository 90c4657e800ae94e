"""The Ray actor that owns worker processes, apart from engines, trainer and driver.

It runs none of the user's code itself, so it always answers; a reward or an episode that hangs or ends its process
costs a ``WorkerProcess``, which is replaced.

Invariant: of a worker process that is gone no descendant lives, not even one that left its session: all of them come to
this process, which adopts orphans. In the driver they could not be distinguished from Ray's (decision 0034).
"""

from __future__ import annotations

import os
from pathlib import Path

from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.system.logs import redirect_output
from asyncrl_cli.system.process_tree import adopt_orphans, descendants, kill_descendants
from asyncrl_cli.workers.messages import Load, Work
from asyncrl_cli.workers.process import WorkerProcess

BLOCKED_S = 30.0
"""Seconds that an episode may block the event loop, and with it all other episodes."""


class WorkerActor:
    """What the actors of rewards and of episodes have in common."""

    def __init__(self, name: str, spec: TaskSpec, search_path: str, log_dir: str, blocked_s: float = BLOCKED_S) -> None:
        """``name`` is that of the log file in ``log_dir``."""
        redirect_output(log_dir, name)
        adopt_orphans()
        self.spec = spec
        self._search_path = Path(search_path)
        self._blocked_s = blocked_s
        self._others = [process.pid for process in descendants([os.getpid()])]
        self._processes: list[WorkerProcess] = []

    async def ping(self) -> None:
        """Answer, which shows that the actor is at work."""

    async def stop(self) -> None:
        """End all processes, with everything that came from them."""
        for process in list(self._processes):
            process.close("the run ends")

    async def start_process(self, work: Work | None) -> WorkerProcess:
        """A process that has loaded the task. Raises ``TaskError``."""
        process = WorkerProcess(Load(self.spec, self._search_path, work, self._blocked_s), self._kill_orphans)
        self._processes.append(process)
        await process.start()
        return process

    def _kill_orphans(self) -> None:
        """Kill whatever came from processes that are gone."""
        self._processes = [process for process in self._processes if not process.closed]
        kill_descendants([*self._others, *(process.pid for process in self._processes)])
