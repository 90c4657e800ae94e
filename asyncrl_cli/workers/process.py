"""A worker process, as its owner uses it. It runs the user's code, and can be killed at any time.

    WorkerProcess  <- a socket ->  python -m asyncrl_cli.workers.child ...   (workers/child.py)
                  <- output ---

Why a process: a thread that hangs cannot be stopped. One that computes in C and holds the interpreter's lock, such as a
regular expression that backtracks endlessly, even stops its own watchdog.

Invariants, whatever the user's code does:

- ``score`` and ``play`` return or raise ``ProcessLost`` within the request's limit and the time that a kill takes.
- The process's descendants and its temporary folder do not outlive it (``on_close`` kills descendants that left its
  group).
- An episode fails if it blocks the event loop or does not end in time. ``ProcessLost`` says for each lost request
  whether it may have been the cause.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure
from asyncrl_cli.system.logs import bound_log
from asyncrl_cli.tasks.base import GIVEN_PYTHONPATH, ModelAccess
from asyncrl_cli.tasks.mix import task_name
from asyncrl_cli.workers.messages import (
    BEAT_S,
    GRACE_S,
    Beat,
    BlockedLoop,
    Cancel,
    Load,
    LoadedTask,
    Play,
    Played,
    Retry,
    Role,
    Score,
)
from asyncrl_cli.workers.scoring import Answer, Response, took_too_long

CHILD = "asyncrl_cli.workers.child"
START_S = 600.0
"""Seconds that importing and constructing the task may take."""
EXIT_S = 10.0
"""Seconds that the kernel has to end a process after SIGKILL."""
ASYNC_GRACE_S = 1.0
"""Seconds after an async reward's limit that its process has to report the timeout itself."""
LAST_S = 1.0
"""Seconds to read last answers after the process ended, and for a process with episodes to end after it closed its
socket."""
SILENT_S = 15.0
"""A process with episodes counts as hung if it is silent for so many seconds more than its loop may be blocked: some
code holds the interpreter's lock."""
CHUNK = 2**16
LARGEST = 2**28
"""Bytes of the longest answer: a number, or a line of text."""


class ProcessLost(Exception):
    """The process ended before it answered; the message says how. ``retry``: how to repeat the request, depending on
    whether it may have been the cause."""

    def __init__(self, how: str, retry: Retry) -> None:
        super().__init__(how)
        self.retry = retry


class WorkerProcess:
    """One process, started by ``start``. It must be used in one event loop, in a thread that outlives the process.

    ``retired``: the process gets no more requests. ``closed``: the process is gone.
    """

    def __init__(self, load: Load, on_close: Callable[[], None] = lambda: None, quiet: bool = False) -> None:
        """``on_close`` must kill descendants that are left when the process is gone. ``quiet``: discard its output."""
        self._load = load
        self._quiet = quiet
        self._on_close = on_close
        self._request_ids = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._readers: list[int] = []
        self._silent_s = 0.0
        self._output = 0
        self.task_info = LoadedTask(Role.PLAIN, {})
        self.retired = False
        self.closed = False
        self.pid = 0

    async def start(self) -> None:
        """Start the process and have it load the task. Raises ``TaskError`` if the task cannot be loaded."""
        self._loop = asyncio.get_running_loop()
        # A folder for each process: the files of a killed one are removed during the run.
        self._folder = tempfile.mkdtemp(prefix="asyncrl-work-")
        mine, theirs = socket.socketpair()
        their_output: int | None = None  # rewards write to the log directly, without a limit
        if self._quiet:
            their_output = subprocess.DEVNULL
        elif self._load.role is Role.EPISODES:
            self._output, their_output = os.pipe()
        # The kernel ends the process together with the thread that starts it, so this thread must outlive it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", CHILD, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=their_output,
            stderr=their_output,
            env=os.environ
            | {
                # The child finds the task's modules where this process would.
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                GIVEN_PYTHONPATH: os.environ.get("PYTHONPATH", ""),
                "TMPDIR": self._folder,
            },
            start_new_session=True,  # a group that can be killed as a whole
        )
        self.pid = self._process.pid
        theirs.close()
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._exit = os.pidfd_open(self.pid)
        self._watch(self._exit, self._on_exit)
        if their_output is not None and not self._quiet:
            os.close(their_output)
            self._watch(self._output, self._on_output)
        reader, self._writer = await asyncio.open_connection(sock=mine)
        listening = asyncio.create_task(self._listen(reader))
        self._tasks += [listening, asyncio.create_task(self._close_at_end(listening))]
        try:
            self.task_info = await self._load_task()
        except BaseException:
            self.close("it was not started")
            raise
        if self.task_info.role is Role.EPISODES:
            self._tasks.append(asyncio.create_task(self._close_if_silent()))

    @property
    def usable(self) -> bool:
        """True if the process takes requests: it is not retired, and has not ended."""
        return not self.retired and not self._tasks[0].done() and self._status() is None

    async def score(self, response: Response, limit_s: float) -> Answer:
        """Score one response. After ``limit_s`` seconds the process is killed, unless the reward is async and can be
        cancelled.

        Raises ``ProcessLost`` if the process ended, or was killed because of another reward.
        """
        alone = not self._answers
        try:
            grace_s = ASYNC_GRACE_S if self.task_info.role is Role.ASYNC else 0.0
            scored: Answer = await self._ask(Score(response, limit_s), limit_s + grace_s)
        except TimeoutError:
            alone = alone and not self._answers
            self.close("it did not answer", Retry.ISOLATED)
            if not alone:  # any of these rewards may be the one that hangs
                raise ProcessLost("it did not answer", Retry.ISOLATED) from None
            locations = self.task_info.locations
            location = locations.get("") or locations.get(task_name(response[0]), "")
            return took_too_long(self.name_for(response[0]), response[0], limit_s, location)
        return scored

    async def play(self, prompt: Prompt, access: ModelAccess | None) -> Played:
        """Play one episode, or try it without a model (``Play``). Cancelling the call stops the episode."""
        limit_s = self._load.spec.episode.timeout_s + 3 * GRACE_S
        name = self.task_info.names[""]
        try:
            played: Played = await self._ask(Play(prompt, access), limit_s)
        except TimeoutError:
            self.retired = True
            return Played(RewardFailure(f"{name}: the episode of prompt {prompt.uid!r} hangs"))
        except ProcessLost as lost:
            return Played(RewardFailure(f"{name}: {lost}"), lost.retry)
        return played

    def name_for(self, prompt: Prompt) -> str:
        """The user's name for the reward of a prompt."""
        names = self.task_info.names
        return names.get("") or names.get(task_name(prompt), "the reward")

    def close_if_idle(self) -> None:
        """Close a retired process that has no requests left."""
        if self.retired and not self._answers:
            self.close("it was retired")

    def close(self, how: str, retry: Retry = Retry.NONE) -> None:
        """Kill the process and its descendants. Pending requests raise ``ProcessLost`` with the process's exit status,
        if it had ended already, or with ``how``."""
        if self.closed or not self.pid:
            return
        self.closed = self.retired = True
        self._how = how = self._status() or how
        # Kill before waiting: until it is waited for, a process keeps its pid, so no other process can be hit.
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)
        # The descendants first: they could still write to the folder.
        self._on_close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._output:
            with suppress(OSError):  # the last output
                while self._copy_output(self._output):
                    pass
        for descriptor in self._readers:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        if hasattr(self, "_writer"):
            self._writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        for request_id in list(self._answers):
            self._answer(request_id, ProcessLost(how, retry))

    async def _load_task(self) -> LoadedTask:
        use = self._load.spec.use
        name, location = (use, "task.use") if use else ("the mix", "task.mix")
        try:
            answer: LoadedTask | TaskError = await self._ask(self._load, START_S)
        except ProcessLost as lost:
            log = "episode-worker-*.log" if self._load.role is Role.EPISODES else "scorer.log"
            hint = "import the task's module with Python to see why" if self._quiet else f"see {log} in the run's logs"
            raise TaskError(f"loading {name} failed: {lost}", location=location, hint=hint) from None
        except TimeoutError:
            reason = f"loading {name} took more than {START_S:.0f} s"
            raise TaskError(reason, location=location, hint="make its import faster") from None
        if isinstance(answer, TaskError):
            raise answer
        return answer

    async def _ask(self, message: object, limit_s: float) -> Any:
        """Send a request and return its answer. Raises ``ProcessLost``, and ``TimeoutError`` if there is none in time.

        A cancelled request stays pending until the process has answered it, so the process does not count as idle.
        """
        if self.closed:
            raise ProcessLost(self._how, Retry.ISOLATED)
        request_id = next(self._request_ids)
        answer = self._answers[request_id] = self._loop.create_future()
        self._send(request_id, message)
        try:
            async with asyncio.timeout(limit_s):
                result = await asyncio.shield(answer)
        except TimeoutError:
            self._answers.pop(request_id, None)
            raise
        except asyncio.CancelledError:
            if not self.closed:
                self._send(request_id, Cancel())
            raise
        if isinstance(result, ProcessLost):
            raise result
        return result

    def _send(self, request_id: int, message: object) -> None:
        data = pickle.dumps((request_id, message))
        self._writer.write(len(data).to_bytes(4, "big") + data)

    def _answer(self, request_id: int, answer: object) -> None:
        future = self._answers.pop(request_id, None)
        if future is not None and not future.done():
            future.set_result(answer)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Take answers until the process closes the socket or sends something else."""
        try:
            while (size := int.from_bytes(await reader.readexactly(4), "big")) <= LARGEST:
                request_id, answer = pickle.loads(await reader.readexactly(size))
                self._silent_s = 0.0
                if isinstance(answer, Beat):
                    continue
                if isinstance(answer, BlockedLoop):
                    reason = f"blocked the event loop for {self._load.blocked_s:g} s (a call that waits without await?)"
                    if request_id is not None:
                        self._answer(
                            request_id, Played(RewardFailure(f"{self.task_info.names['']}: the episode {reason}"))
                        )
                    self.close(f"another episode {reason}", Retry.ISOLATED if request_id is None else Retry.RESUME)
                    return
                if isinstance(answer, Played) and answer.stuck:
                    self.retired = True
                self._answer(request_id, answer)
                self.close_if_idle()
        except (EOFError, OSError):
            return
        except Exception:
            traceback.print_exc()
        self.close("its process sent an invalid answer", Retry.ISOLATED)

    async def _close_at_end(self, listening: asyncio.Task[None]) -> None:
        """Close when the process has ended, or closed its socket and does not end."""
        ends: set[asyncio.Future[Any]] = {listening, self._exited}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        # Read the last answer first: it may arrive together with the process's end. This wait is bounded, because a
        # descendant may keep the socket open. If a process with rewards closed only its socket, the reward's own limit
        # bounds the wait.
        waits = self._load.role is not Role.EPISODES and not self._exited.done()
        await asyncio.wait(ends, timeout=None if waits else LAST_S)
        self.close("its process closed its socket", Retry.ISOLATED)

    async def _close_if_silent(self) -> None:
        """Close a process that is silent for too long. This loop counts its turns instead of reading a clock, so time
        during which the machine was suspended does not count."""
        limit_s = self._load.blocked_s + SILENT_S
        self._silent_s = 0.0
        while self._silent_s < limit_s:
            await asyncio.sleep(BEAT_S)
            self._silent_s += BEAT_S
        self.close(f"it gave no sign of life for {limit_s:.0f} s", Retry.ISOLATED)

    def _watch(self, descriptor: int, on_readable: Callable[[int], None]) -> None:
        os.set_blocking(descriptor, False)
        self._readers.append(descriptor)
        self._loop.add_reader(descriptor, on_readable, descriptor)

    def _on_exit(self, exited: int) -> None:
        self._loop.remove_reader(exited)
        if not self._exited.done():
            self._exited.set_result(None)

    def _on_output(self, output: int) -> None:
        with suppress(OSError):
            if not self._copy_output(output):  # the last process that had the pipe open has ended
                self._loop.remove_reader(output)

    def _copy_output(self, output: int) -> bool:
        """Copy a piece of the process's output to the log; False at its end."""
        chunk = os.read(output, CHUNK)
        bound_log()
        os.write(1, chunk)
        return bool(chunk)

    def _status(self) -> str | None:
        """How the process ended; None if it has not. Does not reap it, so the pid stays valid for ``close``."""
        exit_info = os.waitid(os.P_PIDFD, self._exit, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if exit_info is None:
            return None
        by_signal = exit_info.si_code != os.CLD_EXITED
        how = (
            f"signal {signal.Signals(exit_info.si_status).name}" if by_signal else f"exit status {exit_info.si_status}"
        )
        return f"its process ended ({how})"
