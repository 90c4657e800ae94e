"""A process that rewards have to themselves: whatever they do, the process's owner goes on.

    RewardProcess  <- a socket ->  python -m asyncrl_cli.workers.reward_child DESCRIPTOR OWNER

A thread that hangs cannot be stopped, and one that spins in C with the interpreter's lock held (a regular
expression that backtracks for ever) would stop its own watchdog, too. A process can be killed. Plain functions run in
its main thread, one at a time, as functions that set alarms need it. Async ones share an event loop there.

Invariant: ``RewardProcess.score`` returns within the reward's limit and the time that killing a process takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.workers.scoring import Response, RewardFailure, Scored, took_too_long

CHILD = "asyncrl_cli.workers.reward_child"
START_S = 600.0
"""Seconds that importing and making the task may take."""
EXIT_S = 10.0
"""Seconds that the kernel gets to end a process after SIGKILL."""
GRACE_S = 1.0
"""Seconds after its limit within which an async reward's own process says that it took too long."""
LAST_WORDS_S = 0.02
"""Seconds between a process's end and that of listening to it."""
LARGEST = 2**28
"""Bytes of a longest answer: a number, or a line of text."""


class ProcessEnded(Exception):
    """The process ended before it answered; says how."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a process found when it had loaded the task.

    Args:
        names: what the user calls the reward, by the name of the mix's task ("" when there is no mix).
        awaiting: those whose reward is an async function.
        together: whether this process runs async rewards, several at a time; else plain ones.
    """

    names: dict[str, str]
    awaiting: frozenset[str]
    together: bool


class RewardProcess:
    """One process; made by ``start``. To be used in one event loop, in a thread that outlives the process."""

    def __init__(self) -> None:
        # What a killed process leaves in it goes with it; nobody else would remove a sandbox's files during the run.
        self._temporary = tempfile.TemporaryDirectory(prefix="asyncrl-reward-", ignore_cleanup_errors=True)
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", CHILD, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # The task is looked for where this process would find it.
                env=os.environ
                | {
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    "TMPDIR": self._temporary.name,
                },
                start_new_session=True,  # with what it starts itself, it is one group to kill
            )
        self._socket = ours
        self._exit = os.pidfd_open(self._process.pid)
        self._closed = False
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._listening: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.loaded = Loaded({}, frozenset(), False)

    @classmethod
    async def start(cls, spec: TaskSpec, search_path: Path, together: bool | None = None) -> RewardProcess:
        """Start a process and have it load the task. ``together`` says which rewards it is for; None leaves it to
        the task: async ones if all are. Raises ``TaskError`` when the task cannot be loaded."""
        process = cls()
        try:
            reader, process._writer = await asyncio.open_unix_connection(sock=process._socket)
            process._listening = asyncio.create_task(process._listen(reader))
            asyncio.get_running_loop().add_reader(process._exit, process._on_exit)
            loaded = await process._load((spec, search_path, together))
        except BaseException:
            process.close()
            raise
        process.loaded = loaded
        return process

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        listening = self._listening is not None and not self._listening.done()
        return not self._closed and listening and not self._has_ended()

    async def score(self, response: Response, limit_s: float) -> Scored | RewardFailure:
        """The reward of one response. A plain one that takes more than ``limit_s`` seconds costs the process.

        Raises ``ProcessEnded`` when the process ended, or was ended for what another reward did.
        """
        alone = not self._answers
        try:
            scored: Scored | RewardFailure = await self._ask(
                (response, limit_s), limit_s + GRACE_S if self.loaded.together else limit_s
            )
        except TimeoutError:
            alone = alone and not self._answers
            self.close()
            if not alone:
                raise ProcessEnded("it did not answer") from None
            return took_too_long(self.name_for(response), response[0], limit_s)
        return scored

    def name_for(self, response: Response) -> str:
        """What the user calls the reward of a response."""
        names = self.loaded.names
        return names.get("") or names.get(response[0].uid.partition("/")[0], "the reward")

    def close(self) -> None:
        """Kill the process and whatever it has started."""
        if self._closed:
            return
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._exit)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(EXIT_S)
        self._temporary.cleanup()
        if self._listening is not None:
            self._listening.cancel()
        if self._writer is not None:
            self._writer.transport.abort()
        self._socket.close()
        os.close(self._exit)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ProcessEnded(_how(self._process.returncode)))

    async def _load(self, order: tuple[TaskSpec, Path, bool | None]) -> Loaded:
        spec = order[0]
        place = f"task.use: {spec.use}" if spec.use else "task.mix"
        try:
            loaded: Loaded | TaskError = await self._ask(order, START_S)
        except ProcessEnded as ended:
            hint = "logs/scorer.log may say more"
            raise TaskError(f"loading the task ended its process ({ended})", location=place, hint=hint) from None
        except TimeoutError:
            hint = "make its import faster"
            raise TaskError(f"loading the task took more than {START_S:.0f} s", location=place, hint=hint) from None
        if isinstance(loaded, TaskError):
            raise loaded
        return loaded

    async def _ask(self, question: object, limit_s: float) -> Any:
        """The answer. Raises ``ProcessEnded``, and ``TimeoutError`` when there was none in time.

        The process may close its socket before it ends; it has the rest of its time to end with a status of its own.
        """
        if self._closed:
            raise ProcessEnded(_how(self._process.returncode))
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        assert self._writer is not None
        data = pickle.dumps((number, question))
        self._writer.write(len(data).to_bytes(4, "big") + data)
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        finally:
            del self._answers[number]

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Hand out answers until the process closes the socket, or says what is no answer."""
        try:
            while (size := int.from_bytes(await reader.readexactly(4), "big")) <= LARGEST:
                number, answer = pickle.loads(await reader.readexactly(size))
                future = self._answers.get(number)
                if future is not None and not future.done():
                    future.set_result(answer)
        except (EOFError, OSError):
            return
        except Exception:
            traceback.print_exc()
        self.close()

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._exit)
        # Its last answer may have come together with its end, and is to be read first.
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self.close)

    def _has_ended(self) -> bool:
        # Looked at only: as long as nobody has waited for it, its pid names it.
        return os.waitid(os.P_PIDFD, self._exit, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _how(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
