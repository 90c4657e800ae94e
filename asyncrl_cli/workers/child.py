"""The program of a worker process: it runs the user's code.

    WorkerProcess (workers/process.py)  <- a socket ->  python -m asyncrl_cli.workers.child SOCKET OWNER

Plain rewards run in the main thread, one at a time. Episodes share an event loop there, and so do async rewards. The
user's code may print, hang, or end the process; the owner deals with that.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.rewards import RewardFailure
from asyncrl_cli.system.network import bypass_proxies
from asyncrl_cli.system.process_tree import adopt_orphans, descendants, die_with, reap
from asyncrl_cli.tasks.base import SPEC_FOLDER
from asyncrl_cli.tasks.load import load_task
from asyncrl_cli.tasks.mix import MixTask
from asyncrl_cli.workers.episode_player import EpisodePlayer, display_name
from asyncrl_cli.workers.messages import BEAT_S, Beat, BlockedLoop, Cancel, Load, LoadedTask, Play, Role, Score
from asyncrl_cli.workers.scoring import (
    Response,
    awaits,
    reward_location,
    reward_name,
    score,
    score_async,
    took_too_long,
)

ORPHANS_S = 60.0
"""A child that has ended and has not been reaped for so many seconds counts as adopted."""


class Owner:
    """The socket to the owner. Any thread may send."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._connection: Connection[Any, Any] = Connection(descriptor)
        self._sending = threading.Lock()

    def receive(self) -> tuple[int, Any]:
        """Wait for the next request and its number. Raises ``EOFError`` once the owner has closed the socket."""
        request_id, message = self._connection.recv()
        return request_id, message

    def send(self, request_id: int | None, message: object) -> None:
        """Answer the request with this number; None sends a message without a request."""
        with self._sending:
            self._connection.send((request_id, message))


class Orphans:
    """Reaps adopted processes after they end.

    The kernel does not say which children were adopted. User code may still want the exit status of its own, so a child
    is reaped only ``ORPHANS_S`` after it ended.
    """

    def __init__(self) -> None:
        self._ended_pids: frozenset[int] = frozenset()
        self._looked = time.monotonic()

    def reap(self) -> None:
        """Reap what is due; called often, looks every ``ORPHANS_S``."""
        if time.monotonic() - self._looked < ORPHANS_S:
            return
        self._looked = time.monotonic()
        me = os.getpid()
        ended_pids = frozenset(
            process.pid for process in descendants([me]) if process.is_zombie and process.parent == me
        )
        reap(ended_pids & self._ended_pids)
        self._ended_pids = ended_pids


class Heartbeat(threading.Thread):
    """Sends a ``Beat`` every ``BEAT_S`` while the event loop runs, and ``BlockedLoop`` after ``blocked_s`` without it.

    It counts its own turns instead of seconds: after the machine was suspended, no loop counts as blocked.
    """

    def __init__(
        self, owner: Owner, blocked_s: float, blocked_by: Callable[[asyncio.AbstractEventLoop], int | None] | None
    ) -> None:
        """``blocked_by`` returns the episode that runs in the loop; without it, a blocked loop is not reported."""
        super().__init__(name="heartbeat", daemon=True)
        self._owner = owner
        self._allowed_misses = max(1, round(blocked_s / BEAT_S))
        self._blocked_by = blocked_by
        self._orphans = Orphans()
        self._loop = asyncio.get_running_loop()
        self._ran = True

    def run(self) -> None:
        missed = 0
        while True:
            if self._ran:
                self._ran, missed = False, 0
                self._loop.call_soon_threadsafe(setattr, self, "_ran", True)
                self._owner.send(None, Beat())
            else:
                missed += 1
                if missed == self._allowed_misses and self._blocked_by is not None:
                    self._owner.send(self._blocked_by(self._loop), BlockedLoop())
            self._orphans.reap()
            time.sleep(BEAT_S)


def main(descriptor: int, owner_pid: int) -> None:
    """Load the task, then answer requests until the owner closes the socket."""
    die_with(owner_pid)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's processes block signals that user code may need
    adopt_orphans()  # orphans of user code must end with this process, not with another's (decision 0034)
    os.set_inheritable(descriptor, False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    owner = Owner(descriptor)
    request_id, load = owner.receive()
    try:
        task, loaded_task = _load(load)
    except TaskError as error:
        owner.send(request_id, error)
        return
    ready = partial(owner.send, request_id, loaded_task)
    if loaded_task.role is Role.PLAIN:
        ready()
        _score_in_turn(task, owner)
    else:
        asyncio.run(_serve(task, role=loaded_task.role, load=load, owner=owner, ready=ready))


def _load(load: Load) -> tuple[object, LoadedTask]:
    """Set the memory limit, then load the task. Raises ``TaskError``."""
    spec = load.spec
    os.environ[SPEC_FOLDER] = str(load.search_path.resolve())
    bypass_proxies()  # in a cluster, this process has the environment of `ray start`
    if load.role is Role.EPISODES:
        rlimit, limit_mb = resource.RLIMIT_AS, spec.episode.memory_mb
    else:
        rlimit, limit_mb = resource.RLIMIT_DATA, spec.reward_memory_mb
    if limit_mb is not None:
        resource.setrlimit(rlimit, (limit_mb * 2**20, limit_mb * 2**20))
    task = load_task(spec, load.search_path, connect=load.role is Role.EPISODES)
    if load.role is Role.EPISODES:
        return task, LoadedTask(Role.EPISODES, {"": display_name(task)})
    members = dict(task.tasks) if isinstance(task, MixTask) else {"": task}
    role = load.role or (Role.ASYNC if all(map(awaits, members.values())) else Role.PLAIN)
    names = {name: reward_name(member) for name, member in members.items()}
    return task, LoadedTask(role, names, {name: reward_location(member) for name, member in members.items()})


def _score_in_turn(task: object, owner: Owner) -> None:
    orphans = Orphans()
    while True:
        try:
            request_id, message = owner.receive()
        except EOFError:
            return
        if isinstance(message, Score):
            owner.send(request_id, score(*_resolved(task, message.response)))
            orphans.reap()


async def _serve(task: object, role: Role, load: Load, owner: Owner, ready: Callable[[], None]) -> None:
    """Answer requests in the event loop. ``ready`` is called when everything is imported and started."""
    loop = asyncio.get_running_loop()
    running: dict[int, asyncio.Task[None]] = {}
    player = EpisodePlayer(task, load.spec.episode.timeout_s, load.spec.sandbox) if role is Role.EPISODES else None
    Heartbeat(owner, load.blocked_s, None if player is None else player.traces.holder).start()
    ready()  # only now: a failure before, such as an import without enough memory, must fail the start

    async def answer(request_id: int, message: Score | Play) -> None:
        if isinstance(message, Play):
            assert player is not None
            owner.send(request_id, await player.play(request_id, message))
        else:
            owner.send(request_id, await _score(task, message))

    def receive() -> None:
        # Reading may block the loop, but only briefly: the owner writes each message in one piece.
        try:
            request_id, message = owner.receive()
        except (EOFError, OSError):
            os._exit(0)  # an orderly exit could wait without limit for threads and tasks of user code
        if not isinstance(message, Cancel):
            running[request_id] = loop.create_task(answer(request_id, message))
            running[request_id].add_done_callback(lambda _: running.pop(request_id))
        elif player is not None:
            player.cancel(request_id)
        elif request_id in running:
            running[request_id].cancel()

    loop.add_reader(owner.descriptor, receive)
    await asyncio.Event().wait()


async def _score(task: object, message: Score) -> object:
    member, response = _resolved(task, message.response)
    try:
        async with asyncio.timeout(message.limit_s):
            return await score_async(member, response)
    except TimeoutError:
        return took_too_long(reward_name(member), message.response[0], message.limit_s, reward_location(member))
    except asyncio.CancelledError:
        return RewardFailure("it was cancelled")


def _resolved(task: object, response: Response) -> tuple[Any, Response]:
    """The task that scores a response, and the response with the prompt in that task's form."""
    if not isinstance(task, MixTask):
        return task, response
    member, prompt = task.scored_by(response[0])
    return member, (prompt, *response[1:])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
