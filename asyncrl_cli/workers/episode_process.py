"""The process that plays episodes: it runs the user's agents and environments, many at a time, in one event loop.

    EpisodeProcess (workers/episode_owner.py)  <- a socket ->  python -m asyncrl_cli.workers.episode_process ...
                                             <- the pulse -

Environments and whatever agents hand to ``asyncio.to_thread`` run in threads. Another thread gives the pulse: a byte
a second while the loop turns, and the episode that holds it when it does not. The task's own code may print, hang, or
end the process; seeing to that is the owner's part.

Invariant: an episode that was begun is answered once, within its time and ``GRACE_S``, or the loop stands still and
the pulse says so. What an episode has left running in the loop is cancelled when it ends; what does not stop then is
told as ``stuck``.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.system.process_tree import adopt_orphans, descendants, die_with, reap
from asyncrl_cli.tasks.base import SPEC_FOLDER, AgentTask, EnvironmentTask, ModelAccess, task_of
from asyncrl_cli.tasks.load import load_task
from asyncrl_cli.tasks.play import play
from asyncrl_cli.workers.episode_messages import (
    BEAT_S,
    BEATS,
    GRACE_S,
    HELD,
    Ended,
    Load,
    Loaded,
    Play,
    receive,
    send,
)
from asyncrl_cli.workers.scoring import RewardFailure, Scored, checked, failed

THREADS = 512
"""Threads at most, for environments and agents together; they are made as they are needed."""
_EPISODE: ContextVar[int] = ContextVar("episode")


class _Traces:
    """Which tasks and threads are whose: a task belongs to the episode in whose context it was made."""

    def __init__(self) -> None:
        self._tasks: defaultdict[int, WeakSet[asyncio.Task[Any]]] = defaultdict(WeakSet)
        self._owner: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self._calls: defaultdict[int, set[Future[Any]]] = defaultdict(set)

    def make_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **more: Any
    ) -> asyncio.Task[Any]:
        """The loop's task factory."""
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **more)
        context = more.get("context")
        episode = _EPISODE.get(None) if context is None else context.get(_EPISODE)
        if episode is not None:
            self._tasks[episode].add(task)
            self._owner[task] = episode
        return task

    def called(self, call: Future[Any]) -> None:
        """A thread is asked for something."""
        if (episode := _EPISODE.get(None)) is not None:
            calls = self._calls[episode]
            calls.add(call)
            call.add_done_callback(calls.discard)

    def holder(self, loop: asyncio.AbstractEventLoop) -> int | None:
        """The episode that runs in the loop right now."""
        task = asyncio.current_task(loop)
        return None if task is None else self._owner.get(task)

    async def clear(self, episode: int, grace_s: float) -> bool:
        """Cancel what an episode has left; whether all of it stopped."""
        deadline = time.monotonic() + grace_s
        tasks = [task for task in self._tasks.pop(episode, ()) if not task.done()]
        for task in tasks:
            task.cancel()
        calls = [asyncio.wrap_future(call) for call in list(self._calls.pop(episode, ()))]
        if not (left := {*tasks, *calls}):
            return True
        return not (await asyncio.wait(left, timeout=max(0.0, deadline - time.monotonic())))[1]


class _Threads(ThreadPoolExecutor):
    """The loop's threads, with a trace of who uses them."""

    def __init__(self, traces: _Traces) -> None:
        super().__init__(THREADS, "episode")
        self._traces = traces

    def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        call = super().submit(function, *arguments, **named)
        self._traces.called(call)
        return call


class _Player:
    """Plays the episodes of one task."""

    def __init__(self, task: object, timeout_s: float, writer: asyncio.StreamWriter) -> None:
        import aiohttp

        self._task = task
        self._timeout_s = timeout_s
        self._writer = writer
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._stop: dict[int, asyncio.Event] = {}
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        self.traces = _Traces()
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self.traces.make_task)
        loop.set_default_executor(_Threads(self.traces))

    def begin(self, message: Play) -> None:
        """Play an episode from now on."""
        self._stop[message.number] = asyncio.Event()
        self._playing[message.number] = asyncio.create_task(self._play(message))

    def cancel(self, number: int) -> None:
        """Stop an episode, if it has not ended."""
        if (stop := self._stop.get(number)) is not None:
            stop.set()

    async def _play(self, message: Play) -> None:
        number = message.number
        context = copy_context()
        context.run(_EPISODE.set, number)
        work = self._episode(message.prompt, message.access)
        episode = asyncio.get_running_loop().create_task(work, context=context)
        stop = asyncio.create_task(self._stop[number].wait())
        first = asyncio.FIRST_COMPLETED
        in_time, _ = await asyncio.wait({episode, stop}, timeout=self._timeout_s, return_when=first)
        stop.cancel()
        ended_itself = episode.done()
        stuck = not await self.traces.clear(number, GRACE_S)
        if ended_itself and not episode.cancelled():
            score = episode.result()
        elif in_time:
            score = self._failure(message.prompt, "it was cancelled")
        else:
            score = self._failure(message.prompt, f"it had not ended after {self._timeout_s:g} s")
        send(self._writer, Ended(number, score, bool(in_time) and isinstance(score, RewardFailure), stuck))
        del self._playing[number], self._stop[number]

    def _failure(self, prompt: Prompt, what: str) -> RewardFailure:
        task, prompt = task_of(self._task, prompt)
        return RewardFailure(f"{task_name(task)}: the episode of prompt {prompt.uid!r} failed: {what}")

    async def _episode(self, prompt: Prompt, access: ModelAccess) -> Scored | RewardFailure | None:
        task, prompt = task_of(self._task, prompt)
        name = task_name(task)
        try:
            if isinstance(task, AgentTask):
                value: object = await task.run(prompt, access)
            else:
                assert isinstance(task, EnvironmentTask), "the driver has others' responses generated itself"
                environment = await asyncio.to_thread(task.environment, prompt)
                value = await play(environment, access, self._http)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # sys.exit() would end all episodes
            return failed(error, name, prompt)
        return None if value is None else checked(value, name, prompt)


class _Pulse(threading.Thread):
    """Says every ``BEAT_S`` that the loop turns, and who holds it once it has not turned for ``blocked_s``.

    It counts its own beats, not seconds: a machine that sleeps blocks no loop.
    """

    def __init__(self, descriptor: int, traces: _Traces, blocked_s: float) -> None:
        super().__init__(name="pulse", daemon=True)
        self._descriptor = descriptor
        self._traces = traces
        self._patience = max(1, round(blocked_s / BEAT_S))
        self._loop = asyncio.get_running_loop()
        self._turned = True
        self._zombies: frozenset[int] = frozenset()

    def run(self) -> None:
        missed, beats = 0, 0
        while True:
            if self._turned:
                self._turned, missed = False, 0
                self._loop.call_soon_threadsafe(self._turn)
                os.write(self._descriptor, BEATS)
            else:
                missed += 1
                if missed == self._patience:
                    holder = self._traces.holder(self._loop)
                    os.write(self._descriptor, HELD + b"%s\n" % (b"" if holder is None else b"%d" % holder))
            beats += 1
            if beats % 60 == 0:
                self._bury()
            time.sleep(BEAT_S)

    def _turn(self) -> None:
        self._turned = True

    def _bury(self) -> None:
        """Reap children that ended more than a minute ago: orphans that this process has adopted. Whoever started
        one here and never waited for it does not miss it."""
        me = os.getpid()
        ended = frozenset(process.pid for process in descendants([me]) if process.ended and process.parent == me)
        reap(ended & self._zombies)
        self._zombies = ended


async def _serve(descriptor: int, pulse: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    load: Load = await receive(reader)
    os.environ[SPEC_FOLDER] = str(load.search_path.resolve())
    if load.spec.episode.memory_mb is not None:
        limit = load.spec.episode.memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        task = load_task(load.spec, load.search_path)
    except TaskError as error:
        send(writer, Loaded("", error))
        await writer.drain()
        return
    player = _Player(task, load.spec.episode.timeout_s, writer)
    _Pulse(pulse, player.traces, load.blocked_s).start()
    send(writer, Loaded(task_name(task)))
    while True:
        try:
            message = await receive(reader)
        except (asyncio.IncompleteReadError, OSError):  # the owner is gone, or wants no more
            os._exit(0)  # threads of episodes may hang, and tasks refuse to end
        if isinstance(message, Play):
            player.begin(message)
        else:
            player.cancel(message.number)


def task_name(task: object) -> str:
    """What the user calls a task that plays: ``module:function``, or ``module:Class``."""
    name = getattr(task, "name", None)
    return name if isinstance(name, str) else f"{type(task).__module__}:{type(task).__qualname__}"


def main(descriptor: int, pulse: int, owner: int) -> None:
    """The process: load the task, then play what comes until the owner closes the socket."""
    die_with(owner)
    adopt_orphans()
    for inherited in (descriptor, pulse):
        os.set_inheritable(inherited, False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    asyncio.run(_serve(descriptor, pulse))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
