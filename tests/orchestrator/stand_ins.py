"""Stand-ins for actors: their methods have ``.remote()``, and they can die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import numpy as np
from ray.exceptions import ActorDiedError, RayTaskError

from asyncrl_cli.gateway.actor import GatewayActor, GatewaySetup, Incoming, Outgoing
from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.gateway.sessions import Sessions
from asyncrl_cli.journal.buffer import Buffer, Disk
from asyncrl_cli.orchestrator.placement import PlacementGroup
from asyncrl_cli.orchestrator.watchdog import Watchdog
from asyncrl_cli.records.generation import (
    Delivery,
    EngineActivity,
    EngineRequest,
    Placement,
    Rollout,
    RolloutFailure,
    RolloutRequest,
    Sampling,
    Segment,
)
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.spec.sections import ExperimentSpec, NodeSelector
from asyncrl_cli.system.supervised_actor import RestartBudget, SupervisedActor

P = ParamSpec("P")
T = TypeVar("T")
LIMIT_S = 60.0
"""Seconds after which a test counts as hung."""


def run(test: Coroutine[Any, Any, T]) -> T:
    """Run a test to its end, in its own event loop."""
    return asyncio.run(asyncio.wait_for(test, LIMIT_S))


async def turns(count: int = 10) -> None:
    """Run the event loop this many times: everything that can proceed does."""
    for _ in range(count):
        await asyncio.sleep(0)


class Actor:
    """Calls begin in order, and continue when their caller is cancelled. After ``die`` every call fails, also
    running ones."""

    def __init__(self) -> None:
        self.dead = False
        self._calls: dict[asyncio.Future[Any], asyncio.Future[Any]] = {}

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        """Begin a call. The answer can be awaited like Ray's."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        call = self._calls[answer] = asyncio.ensure_future(work)
        call.add_done_callback(partial(self._ended, answer))
        if self.dead:
            self.die()
        return answer

    def die(self) -> None:
        """Die immediately."""
        self.dead = True
        calls, self._calls = self._calls, {}
        for answer, call in calls.items():
            _fail(answer, ActorDiedError())
            call.cancel()

    def _ended(self, answer: asyncio.Future[Any], call: asyncio.Future[Any]) -> None:
        self._calls.pop(answer, None)
        if call.cancelled():
            _fail(answer, ActorDiedError())
        elif (error := call.exception()) is not None:
            _fail(answer, RayTaskError("method", "traceback", error).as_instanceof_cause())
        elif not answer.done():
            answer.set_result(call.result())


def _fail(answer: asyncio.Future[Any], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # retrieved here, because there may be no caller that waits


class RemoteMethod:
    def __init__(self, actor: Actor, function: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._actor = actor
        self._function = function

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        return Actor.begin(self._actor, self._function(*arguments))  # an actor may have a method `begin`

    def options(self, **_: Any) -> RemoteMethod:
        return self


class remote:
    """Gives an actor's method its ``.remote()``."""

    def __init__(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._function = function

    def __get__(self, actor: Actor, owner: type) -> RemoteMethod:
        return RemoteMethod(actor, partial(self._function, actor))


# -- the gateway


class StandInGateway(Actor):
    """The real gateway without its server, in the test's event loop. Agents find their sessions in ``sessions``."""

    def __init__(self, chat: ChatFormat) -> None:
        super().__init__()
        with patch("asyncrl_cli.gateway.actor.redirect_output"):
            self.inner = GatewayActor("")
        self.inner._chat = chat

    @property
    def sessions(self) -> Sessions:
        return self.inner._sessions

    @remote
    async def start(self, setup: GatewaySetup, port: int) -> tuple[None, str]:
        return None, f"http://host:{port or 7}"

    @remote
    async def tell(self, outgoing: Outgoing) -> None:
        await self.inner.tell(outgoing)

    @remote
    async def collect(self, timeout_s: float) -> Incoming:
        return await self.inner.collect(timeout_s)

    @remote
    async def stop(self) -> None:
        await self.inner.stop()


# -- engines


class StandInEngine(Actor):
    """Records its calls; ``collect`` returns the deliveries from ``deliver``."""

    def __init__(self) -> None:
        super().__init__()
        self.submits = 0
        self.submitted: list[RolloutRequest] = []
        self.cancelled: list[str] = []
        self.aborts = 0
        self.takes = asyncio.Event()
        self.takes.set()
        self._deliveries: asyncio.Queue[Delivery] = asyncio.Queue()
        self._collecting: asyncio.Future[Delivery] | None = None
        self._idle = asyncio.Event()

    @remote
    async def submit(self, requests: list[RolloutRequest]) -> None:
        await self.takes.wait()
        self.submits += 1
        self.submitted += requests

    @remote
    async def cancel(self, rollout_ids: list[str]) -> None:
        self.cancelled += rollout_ids

    @remote
    async def abort(self) -> None:
        await self.takes.wait()
        self.aborts += 1

    @remote
    async def collect(self, timeout_s: float) -> Delivery:
        if self._deliveries.empty():
            self._idle.set()
        self._collecting = asyncio.ensure_future(self._deliveries.get())
        return await self._collecting

    def put(
        self,
        *ended: Rollout | RolloutFailure,
        segments: Iterable[Segment] = (),
        activity: EngineActivity | None = None,
        aborted: Iterable[str] = (),
        placements: Iterable[Placement] = (),
    ) -> None:
        """Queue results for delivery, without their prompts, like a worker."""
        rollouts = [replace(entry, prompt_ids=()) for entry in ended if isinstance(entry, Rollout)]
        failures = [entry for entry in ended if isinstance(entry, RolloutFailure)]
        self._idle.clear()
        activity = activity or EngineActivity()
        self._deliveries.put_nowait(
            Delivery(rollouts, failures, list(segments), activity, list(aborted), list(placements))
        )

    async def deliver(self, *ended: Rollout | RolloutFailure, **more: Any) -> None:
        """Deliver results, and wait until the caller of ``collect`` has processed them."""
        self.put(*ended, **more)
        await self.processed()

    async def processed(self) -> None:
        """Wait until everything is delivered, ``collect`` is called again, and the resulting requests are sent."""
        await self._idle.wait()
        await turns()

    def forget_collector(self) -> None:
        """Deliver nothing more to the caller of ``collect``."""
        if self._collecting is not None:
            self._collecting.cancel()

    @property
    def ids(self) -> list[str]:
        """The submitted ids, in order."""
        return [request.rollout_id for request in self.submitted]


class ReadyGroup(PlacementGroup):
    """A placement group that is always ready."""

    def __init__(self, who: str, count: int = 1) -> None:
        super().__init__(who, {"CPU": 1}, selector=NodeSelector(), count=count)

    def ask(self) -> None:
        pass

    async def ready(self, timeout_s: float) -> bool:
        return True


def watchdog(limit_s: float = 600.0, warn: Callable[[str], None] = print) -> Watchdog:
    """A watchdog that records nothing."""
    return Watchdog(limit_s, warn, record=lambda wait: asyncio.sleep(0))


class StandInProcess(SupervisedActor):
    """An engine's actors, one after another."""

    def __init__(
        self,
        name: str,
        make_actor: Callable[[], Actor] = StandInEngine,
        budget: RestartBudget | None = None,
        node: str = "host-0",
        started: bool = True,
    ) -> None:
        self.node = node
        super().__init__("engine", name, make_actor, self.start, budget or Notes().budget(1000))
        if started:
            self.ask()
            self.started = True

    async def start(self, actor: Any) -> None:
        """The actor is ready immediately."""

    async def replace(self) -> None:
        """Replace the current actor by a new one."""
        await self.lose(self.actor, "replaced")
        await self.running()

    def kill(self) -> None:
        if self.actor is not None:
            self.actor.die()

    async def end(self) -> None:
        """End the engine for good."""
        self.release()


def client_over(
    engines: int,
    retries: int = 0,
    hang_s: float = 600.0,
    on_progress: Callable[[], None] = lambda: None,
    make_actor: Callable[[], Actor] = StandInEngine,
    slots: int = 256,
    on_engine_request: Callable[[EngineRequest], None] = lambda _: None,
) -> GenerationClient:
    """A client with serving engines, named ``engine-0``, ``engine-1``, ..."""
    processes: list[Any] = [StandInProcess(f"engine-{index}", make_actor) for index in range(engines)]
    client = GenerationClient(
        processes,
        slots=slots,
        retries=retries,
        hang_s=hang_s,
        decode=text_of,
        on_progress=on_progress,
        on_engine_request=on_engine_request,
    )
    for engine in client.engines:
        engine.serving = True
    return client


def text_of(ids: Iterable[int]) -> str:
    """A text that shows every token."""
    return "".join(f"<{token}>" for token in ids)


def actors(client: GenerationClient) -> list[Any]:
    """The engines' current actors."""
    return [engine.process.actor for engine in client.engines]


@asynccontextmanager
async def collecting(client: GenerationClient) -> AsyncIterator[None]:
    """Collect from every engine within the block."""
    async with asyncio.TaskGroup() as tasks:
        collectors = [tasks.create_task(client.collect(engine)) for engine in client.engines]
        yield
        for collector, actor in zip(collectors, actors(client), strict=True):
            collector.cancel()
            actor.forget_collector()


# -- the buffer


class Here(Disk):
    """Reads and writes the journal immediately in this thread, which makes the order deterministic."""

    def __init__(self, path: Path, limit_s: float) -> None:
        pass

    async def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        return function(*arguments, **named)

    def stop(self) -> None:
        pass


def kill(buffer: Buffer) -> None:
    """End a buffer like its driver's death: uncommitted data is lost."""
    buffer._book.journal.close()


class Notes(list[tuple[str, str, str]]):
    """The recorded faults; ``warnings`` has the displayed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def budget(self, max_restarts: int = 10) -> RestartBudget:
        return RestartBudget(max_restarts, self._record, self.warnings.append)

    async def _record(self, kind: str, part: str, message: str) -> None:
        self.append((kind, part, message))


# -- records


def request(rollout_id: str, max_tokens: int = 8, **more: Any) -> RolloutRequest:
    return RolloutRequest(rollout_id, (1, 2), Sampling(1.0, max_tokens), **more)


def rollout(
    rollout_id: str, versions: tuple[int, ...] = (0, 0), ids: tuple[int, ...] | None = None, finished: bool = True
) -> Rollout:
    return Rollout(
        rollout_id=rollout_id,
        prompt_ids=(1, 2),
        ids=np.array(ids or range(5, 5 + len(versions)), dtype=np.int32),
        logprobs=np.full(len(versions), -0.5, dtype=np.float32),
        versions=np.array(versions, dtype=np.int32),
        text=f"text of {rollout_id}",
        finish_reason="stop" if finished else "length",
    )


def segment(rollout_id: str, start: int, count: int, version: int = 0) -> Segment:
    """Tokens ``start``, ``start + 1``, ... of ``rollout(rollout_id, ...)``."""
    ids = np.arange(5 + start, 5 + start + count, dtype=np.int32)
    return Segment(rollout_id, start, version, ids, np.full(count, -0.5, dtype=np.float32))


def spec(**sections: Any) -> ExperimentSpec:
    """The smallest spec, with sections changed."""
    smallest: dict[str, Any] = {"model": {"path": "org/model"}, "task": {"use": "chain_sum"}, "stop": {"steps": 10}}
    return ExperimentSpec.model_validate(smallest | sections)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", f"text {i}", {"answer": i}) for i in range(count)]
