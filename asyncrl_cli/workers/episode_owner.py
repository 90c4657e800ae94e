"""The owner's end of a process that plays episodes.

Whatever the episodes do to their process, everyone who awaits ``EpisodeProcess.play`` gets an answer in bounded time:

- an episode that blocks the event loop has failed, and so has one that does not end in its time;
- when the process ends, or hangs without a hint at who did it, its episodes are to be played again ``apart``, where
  there is no doubt any more;
- when it has to be killed for another episode's sake, they are to go ``on`` elsewhere;
- when an episode leaves in it what cannot be stopped, it is retired: it gets no more episodes, and is killed after the
  last one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.tasks.base import ModelAccess
from asyncrl_cli.workers import episode_process
from asyncrl_cli.workers.episode_messages import (
    BEAT_S,
    GRACE_S,
    HELD,
    Cancel,
    Ended,
    Load,
    Loaded,
    Play,
    Retry,
    receive,
    send,
)
from asyncrl_cli.workers.scoring import RewardFailure, Scored

START_S = 600.0
"""Seconds that importing and making the task may take."""
BLOCKED_S = 30.0
"""Seconds that an agent may hold up the event loop, and with it all other episodes."""
SILENT_S = 15.0
"""Seconds without a sign of life, beyond those, after which a process counts as hung: some code holds the
interpreter's lock."""
LOG_BYTES = 16 * 2**20
"""What one process may print into the log; the rest is read and dropped."""
CHUNK = 2**16


@dataclass(frozen=True, slots=True)
class Played:
    """How the playing of an episode ended. ``score`` None leaves it to the task's ``reward``.

    ``retry`` says whether to play it again.
    """

    score: Scored | RewardFailure | None
    retry: Retry = Retry.NONE


class EpisodeProcess:
    """One process and its episodes. ``name`` is what the user calls the task.

    ``retired``: it gets no more episodes. ``closed``: it is gone.
    """

    def __init__(self, spec: TaskSpec, search_path: Path, blocked_s: float, on_close: Callable[[], None]) -> None:
        """``blocked_s``: seconds that the event loop may stand still. ``on_close`` has to kill what is left of a
        process that is gone."""
        self._load = Load(spec, search_path, blocked_s)
        self._on_close = on_close
        self._episodes: dict[int, asyncio.Future[Played]] = {}
        self._silent = 0.0
        self._said = b""
        self._log_left = LOG_BYTES
        self._readers: list[int] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self.retired = False
        self.closed = False
        self.pid = 0
        self.name = ""

    async def start(self) -> None:
        """Start the process and have it load the task. Raises ``TaskError`` when it cannot be loaded."""
        mine, theirs = socket.socketpair()
        pulse, their_pulse = os.pipe()
        output, their_output = os.pipe()
        numbers = (theirs.fileno(), their_pulse, os.getpid())
        # The kernel ends the process with the thread that starts it: this one, which lives as long as the actor.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", episode_process.__name__, *map(str, numbers)],
            pass_fds=numbers[:2],
            stdin=subprocess.DEVNULL,
            stdout=their_output,
            stderr=their_output,
            # The task is looked for where this process would find it.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,
        )
        self.pid = self._process.pid
        theirs.close()
        os.close(their_pulse)
        os.close(their_output)
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._output = output
        self._watch(os.pidfd_open(self.pid), self._on_exit)
        self._watch(output, self._on_output)
        self._watch(pulse, self._on_pulse)
        reader, self._writer = await asyncio.open_connection(sock=mine)
        send(self._writer, self._load)
        loading = asyncio.create_task(self._loaded(reader))
        self._tasks.append(loading)
        try:
            first: set[asyncio.Future[Any]] = {loading, self._ended}
            await asyncio.wait(first, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            self.name = self._name(loading)
        except BaseException:
            self.close("")
            raise
        self._silent = 0.0
        listening = asyncio.create_task(self._listen(reader))
        self._tasks = [listening, asyncio.create_task(self._guard(listening)), asyncio.create_task(self._wait())]

    async def play(self, number: int, prompt: Prompt, access: ModelAccess) -> Played:
        """Play one episode; cancelling this stops it. ``number`` was never used before."""
        limit_s = self._load.spec.episode.timeout_s + 3 * GRACE_S
        episode: asyncio.Future[Played] = asyncio.get_running_loop().create_future()
        self._episodes[number] = episode
        send(self._writer, Play(number, prompt, access))
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(episode)
        except TimeoutError:
            self.retired = True
            self._end(number, Played(RewardFailure(f"{self.name}: the episode of prompt {prompt.uid!r} hangs")))
            return await episode
        except asyncio.CancelledError:
            if not self.closed:
                send(self._writer, Cancel(number))
            raise

    def retire_when_idle(self) -> None:
        """Close a retired process that has nothing to play."""
        if self.retired and not self._episodes:
            self.close("")

    def close(self, reason: str, retry: Retry = Retry.NONE) -> None:
        """Kill the process and what came from it. Its episodes end with the ``reason``."""
        if self.closed:
            return
        self.closed = self.retired = True
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(GRACE_S)
        self._on_close()
        with suppress(OSError):  # its last words
            while self._hand_on():
                pass
        loop = asyncio.get_running_loop()
        for descriptor in self._readers:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        if hasattr(self, "_writer"):
            self._writer.close()
        for task in self._tasks:
            task.cancel()
        for number in list(self._episodes):
            self._end(number, Played(RewardFailure(f"{self.name}: {reason}"), retry))

    def _name(self, loading: asyncio.Task[Loaded]) -> str:
        """What the user calls the task. Raises ``TaskError``."""
        place = f"task.use: {self._load.spec.use}"
        if loading.done() and (error := loading.exception()) is None:
            loaded = loading.result()
            if loaded.error is not None:
                raise loaded.error
            return loaded.name
        if self._ended.done() or loading.done():
            how = self._ended.result() if self._ended.done() else f"{type(error).__name__}"
            raise TaskError(
                f"loading the task ended its process ({how})", location=place, hint="logs/runner-*.log may say more"
            )
        raise TaskError(
            f"loading the task took more than {START_S:.0f} s", location=place, hint="make its import faster"
        )

    async def _loaded(self, reader: asyncio.StreamReader) -> Loaded:
        loaded: Loaded = await receive(reader)
        return loaded

    def _end(self, number: int, played: Played) -> None:
        episode = self._episodes.pop(number, None)
        if episode is not None and not episode.done():
            episode.set_result(played)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                message: Ended = await receive(reader)
                self.retired = self.retired or message.stuck
                self._end(message.number, Played(message.score, Retry.RESTART if message.raised else Retry.NONE))
                self.retire_when_idle()

    async def _guard(self, listening: asyncio.Task[None]) -> None:
        """See the process's end: it may be told before the last answer, and the socket may stay open after it."""
        ends: set[asyncio.Future[Any]] = {listening, self._ended}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(ends, timeout=1.0)
        how = self._ended.result() if self._ended.done() else "it closed its socket"
        self.close(f"the process that played it ended ({how})", Retry.ISOLATED)

    async def _wait(self) -> None:
        """Wait for a process that gives no sign of life. Seconds are counted by turns of this loop: when the machine
        sleeps, nothing is silent."""
        limit_s = self._load.blocked_s + SILENT_S
        while self._silent < limit_s:
            await asyncio.sleep(BEAT_S)
            self._silent += BEAT_S
        self.close(f"the process that played it gave no sign of life for {limit_s:.0f} s", Retry.ISOLATED)

    def _watch(self, descriptor: int, on_readable: Callable[[], None]) -> None:
        os.set_blocking(descriptor, False)
        self._readers.append(descriptor)
        asyncio.get_running_loop().add_reader(descriptor, on_readable)

    def _on_exit(self) -> None:
        status = self._process.poll()
        if status is not None and not self._ended.done():
            self._ended.set_result(f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}")
            asyncio.get_running_loop().remove_reader(self._readers[0])

    def _on_pulse(self) -> None:
        self._silent = 0.0
        with suppress(BlockingIOError):
            self._said += os.read(self._readers[2], CHUNK)
        _, held, holder = self._said.partition(HELD)
        if not held:
            self._said = b""
        elif holder.endswith(b"\n"):
            seconds = f"the event loop for {self._load.blocked_s:g} s (a call that waits without await?)"
            if holder.strip():
                self._end(int(holder), Played(RewardFailure(f"{self.name}: the episode blocked {seconds}")))
            self.close(f"another episode blocked {seconds}", Retry.RESUME if holder.strip() else Retry.ISOLATED)

    def _on_output(self) -> None:
        with suppress(OSError):
            if not self._hand_on():  # everyone has closed it
                asyncio.get_running_loop().remove_reader(self._output)

    def _hand_on(self) -> bool:
        """Hand a piece of what the process prints on to the log, as long as there is room; False at its end."""
        chunk = os.read(self._output, CHUNK)
        if self._log_left > 0:
            os.write(1, chunk[: self._log_left])
            if (left := self._log_left - len(chunk)) <= 0:
                os.write(1, b"\n[asyncrl: process %d has printed more than the log takes]\n" % self.pid)
            self._log_left = left
        return bool(chunk)
