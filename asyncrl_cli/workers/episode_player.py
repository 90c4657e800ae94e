"""Play episodes in a worker process, many at a time in its event loop.

Environments run in threads, like the functions that agents pass to ``asyncio.to_thread``.

Invariant: an episode ends within its time limit and ``GRACE_S``, or it blocks the event loop, and ``Heartbeat``
(workers/child.py) reports it. When an episode ends, everything that it left running in the loop is cancelled. If
something does not stop, the result is marked ``stuck``.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary, WeakSet

from asyncrl_cli.core.user_code import defined_at
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored, Turn
from asyncrl_cli.sandbox.commands import BlockingSandbox, ShellSandbox
from asyncrl_cli.spec.inputs import SandboxSpec
from asyncrl_cli.system.network import bypass_proxies
from asyncrl_cli.tasks.base import AgentTask, EnvironmentTask, ModelAccess, ScoreLater, task_of
from asyncrl_cli.tasks.episode_sandbox import episode_sandbox
from asyncrl_cli.tasks.mix import OneCall
from asyncrl_cli.tasks.play import play, try_environment
from asyncrl_cli.workers.messages import GRACE_S, Play, Played, Retry
from asyncrl_cli.workers.scoring import checked, failed

THREADS = 512
"""Limit on the threads of all environments and agents; they start on demand."""
NO_MODEL = "http://127.0.0.1:9/v1"
"""The sandbox's base URL in an episode without a model: nothing listens at this port."""
_EPISODE: ContextVar[int] = ContextVar("episode")


class _Traces:
    """Maps tasks and calls in threads to the episode that started them."""

    def __init__(self) -> None:
        self._tasks: defaultdict[int, WeakSet[asyncio.Task[Any]]] = defaultdict(WeakSet)
        self._owner: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self._calls: defaultdict[int, set[Future[Any]]] = defaultdict(set)

    def make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **options: Any,
    ) -> asyncio.Task[Any]:
        """The loop's task factory."""
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
        context = options.get("context")
        episode = _EPISODE.get(None) if context is None else context.get(_EPISODE)
        if episode is not None:
            self._tasks[episode].add(task)
            self._owner[task] = episode
        return task

    def called(self, call: Future[Any]) -> None:
        """Note a call that a thread will run."""
        if (episode := _EPISODE.get(None)) is not None:
            calls = self._calls[episode]
            calls.add(call)
            call.add_done_callback(calls.discard)

    def holder(self, loop: asyncio.AbstractEventLoop) -> int | None:
        """Return the episode that runs in the loop now."""
        task = asyncio.current_task(loop)
        return None if task is None else self._owner.get(task)

    async def clear(self, episode: int, grace_s: float) -> bool:
        """Cancel everything that an episode left running; returns False if something did not stop."""
        deadline = time.monotonic() + grace_s
        tasks = [task for task in self._tasks.pop(episode, ()) if not task.done()]
        for task in tasks:
            task.cancel()
        calls = [asyncio.wrap_future(call) for call in list(self._calls.pop(episode, ()))]
        if not (leftovers := {*tasks, *calls}):
            return True
        return not (await asyncio.wait(leftovers, timeout=max(0.0, deadline - time.monotonic())))[1]


class _Threads(ThreadPoolExecutor):
    """The loop's threads; each call is traced to its episode."""

    def __init__(self, traces: _Traces) -> None:
        super().__init__(THREADS, "episode")
        self._traces = traces

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        call = super().submit(function, *arguments, **options)
        self._traces.called(call)
        return call


class EpisodePlayer:
    """Plays the episodes of one task in the running event loop."""

    def __init__(self, task: object, timeout_s: float, sandbox: SandboxSpec | None = None) -> None:
        """``timeout_s``: limit for one episode; ``sandbox``: settings, for tasks that use one."""
        import aiohttp

        self._sandbox = sandbox
        self._task = task
        self._timeout_s = timeout_s
        self._stop: dict[int, asyncio.Event] = {}
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        self.traces = _Traces()
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self.traces.make_task)
        loop.set_default_executor(_Threads(self.traces))

    def cancel(self, episode_id: int) -> None:
        """Stop an episode, if it has not ended."""
        if (stop := self._stop.get(episode_id)) is not None:
            stop.set()

    async def play(self, episode_id: int, message: Play) -> Played:
        """Play one episode; ``episode_id`` is for ``cancel``."""
        if message.access is not None:
            bypass_proxies(urlsplit(message.access.base_url).hostname or "")
        stopped = self._stop[episode_id] = asyncio.Event()
        context = copy_context()
        context.run(_EPISODE.set, episode_id)
        coroutine = self._episode(message.prompt, message.access)
        episode = asyncio.get_running_loop().create_task(coroutine, context=context)
        stop = asyncio.create_task(stopped.wait())
        when_first = asyncio.FIRST_COMPLETED
        in_time, _ = await asyncio.wait({episode, stop}, timeout=self._timeout_s, return_when=when_first)
        stop.cancel()
        ended_itself = episode.done()
        # Before the answer: the owner may use it to close or reuse this process, and leftovers must not disturb others.
        stuck = not await self.traces.clear(episode_id, GRACE_S)
        del self._stop[episode_id]
        if ended_itself and not episode.cancelled():
            played = episode.result()
        elif in_time:
            played = Played(self._failure(message.prompt, "it was cancelled"))
        else:
            played = Played(self._failure(message.prompt, f"it had not ended after {self._timeout_s:g} s"))
        raised = bool(in_time) and isinstance(played.score, RewardFailure)
        return replace(played, retry=Retry.RESTART if raised else Retry.NONE, stuck=stuck)

    def _failure(self, prompt: Prompt, reason: str) -> RewardFailure:
        task, prompt = task_of(self._task, prompt)
        return RewardFailure(f"{display_name(task)}: the episode of prompt {prompt.uid!r} failed: {reason}")

    async def _episode(self, prompt: Prompt, access: ModelAccess | None) -> Played:
        task, prompt = task_of(self._task, prompt)
        name = display_name(task)
        try:
            base_url = NO_MODEL if access is None else access.base_url
            async with episode_sandbox(task, self._sandbox, base_url, prompt) as sandbox:
                value, turns = await self._play(task, prompt=prompt, access=access, sandbox=sandbox)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # sys.exit() in one episode would otherwise end all of them
            return Played(failed(error, name=name, prompt=prompt, location=_location(task)))
        if value is None or isinstance(value, ScoreLater):
            return Played(value)
        score = checked(value, name=name, prompt=prompt, location=_location(task))
        return Played(replace(score, turns=turns) if isinstance(score, Scored) else score)

    async def _play(
        self, task: object, prompt: Prompt, access: ModelAccess | None, sandbox: ShellSandbox | None
    ) -> tuple[object, tuple[Turn, ...]]:
        further: dict[str, Any] = {}
        if isinstance(task, AgentTask):
            assert access is not None, "agents cannot be tried without a model"
            further |= {} if sandbox is None else {"sandbox": sandbox}
            return await task.run(prompt, access, **further), ()
        assert isinstance(task, EnvironmentTask), "responses of other tasks are generated by the driver"
        if sandbox is not None:
            further["sandbox"] = BlockingSandbox(sandbox, asyncio.get_running_loop())
        environment = await asyncio.to_thread(task.environment, prompt, **further)
        if access is None:
            return await asyncio.to_thread(try_environment, environment, prompt), ()
        return await play(environment, access, self._http, images=prompt.images)


def _location(task: object) -> str:
    """Where the user's code computes the episode's reward, if known."""
    return defined_at(next(filter(None, (getattr(task, name, None) for name in ("function", "judge", "run"))), None))


def display_name(task: object) -> str:
    """The user's name for a task that plays episodes: ``module:function``, or ``module:Class``."""
    task = task.task if isinstance(task, OneCall) else task
    name = getattr(task, "name", None)
    return name if isinstance(name, str) else f"{type(task).__module__}:{type(task).__qualname__}"
