"""Engines join and leave while a run continues. No recorded token is lost, and other engines are not disturbed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import pytest
from stand_ins import Notes, StandInEngine, StandInProcess, request, segment, turns

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator import engine_pool
from asyncrl_cli.orchestrator.engine_pool import EnginePool
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.rollout.open_requests import EngineState

pytestmark = pytest.mark.slow


async def serve(engine: EngineState) -> None:
    engine.serving = True


class Scene:
    """A pool in a cluster with ``room`` for more engines, each on its own node."""

    def __init__(self, started: int, target: int, room: int, max_restarts: int) -> None:
        self.notes = Notes()
        self.changes: list[tuple[str, str, str]] = []
        self.counts: list[tuple[int, int]] = []
        self.messages: list[str] = []
        self.room = asyncio.Semaphore(room)
        self.failing = 0
        self.gone: set[str] = set()
        self.budget = self.notes.budget(max_restarts)
        processes = [self.process(f"engine-{index}") for index in range(started)]
        self.client = GenerationClient(processes, slots=4, retries=0, hang_s=600.0, decode=str)
        here: Any = self
        gpu_turn = asyncio.Event()
        gpu_turn.set()
        self.pool = EnginePool(
            target,
            make=here.further,
            client=self.client,
            bring_up=serve,
            buffer=here,
            budget=self.budget,
            reporter=here,
            gpu_turn=gpu_turn,
        )

    def why_gone(self, node: str) -> str:
        return "its node is gone" if node in self.gone else ""

    def process(self, name: str) -> StandInProcess:
        process = StandInProcess(name, StandInEngine, self.budget)
        process.node = f"node of {name}"
        return process

    def further(self, name: str) -> StandInProcess:
        """An additional engine, which waits for room."""
        process = self.process(name)

        async def join(waits: Callable[[str], None]) -> None:
            waits(f"{name} waits until Ray has room for it: no room")
            await self.room.acquire()
            if self.failing:
                self.failing -= 1
                raise RunError("it does not start", location=name)

        process.join = join  # type: ignore[method-assign]
        return process

    def warn(self, text: str) -> None:
        self.messages.append(text)

    def engines(self, serving: int, wanted: int, waits: str) -> None:
        self.counts.append((serving, wanted))

    def engine_changed(self, name: str, change: str, reason: str) -> None:
        self.changes.append((name, change, reason))

    @property
    def serving(self) -> list[str]:
        return [engine.name for engine in self.client.serving()]

    def engine(self, name: str) -> StandInEngine:
        (found,) = [engine.process.actor for engine in self.client.engines if engine.name == name]
        return found  # type: ignore[no-any-return]

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until the pool fulfils a condition."""
        while not condition():
            await asyncio.sleep(0.001)

    async def ask(self, *names: str) -> None:
        self.client.enqueue(map(request, names), lambda ended: None)
        await self.client.flush()


@asynccontextmanager
async def pooled(started: int, target: int, room: int = 10, max_restarts: int = 0) -> AsyncIterator[Scene]:
    """A running pool with its first engines."""
    scene = Scene(started, target, room, max_restarts)
    with patch("asyncrl_cli.orchestrator.nodes.why_gone", scene.why_gone):
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(scene.pool.run())
            await scene.until(lambda: len(scene.client.serving()) >= started)
            yield scene
            working.cancel()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool checks and retries without delay."""
    for name in ("LOOK_S", "RETRY_S"):
        monkeypatch.setattr(engine_pool, name, 0.001)


async def test_engines_join_when_there_is_room_and_the_wait_is_reported_once() -> None:
    async with pooled(1, 4, room=1) as scene:
        await scene.until(lambda: len(scene.serving) == 2)
        await scene.ask("a", "b")
        assert sorted(scene.engine("engine-0").ids + scene.engine("engine-1").ids) == ["a", "b"]
        await scene.until(lambda: scene.counts[-1] == (2, 4))
        assert len([text for text in scene.messages if "no room" in text]) == 2, "once before engine-1, once after it"
        scene.room.release()
        scene.room.release()
        await scene.until(lambda: scene.counts[-1] == (4, 4))
        assert [(name, change) for name, change, _ in scene.changes] == [(f"engine-{n}", "join") for n in range(4)]


async def test_a_dead_engine_is_started_again_while_another_continues_its_requests() -> None:
    async with pooled(2, 2, max_restarts=1) as scene:
        await scene.ask("a", "b")
        dies, continues = scene.engine("engine-0"), scene.engine("engine-1")
        await dies.deliver(segments=[segment("a", 0, 3)])
        dies.die()
        await scene.until(lambda: scene.serving == ["engine-0", "engine-1"] and scene.engine("engine-0") is not dies)
        await turns()
        assert continues.ids == ["b", "a"]
        assert [(part.start, part.end) for part in continues.submitted[-1].prefix] == [(0, 3)]
        assert scene.notes == [("engine", "engine-0", "the process died")]
        await scene.ask("c")
        assert scene.engine("engine-0").ids == ["c"]


async def test_an_engine_that_is_lost_with_its_node_costs_no_restart() -> None:
    async with pooled(1, 1) as scene:
        await scene.ask("a")
        lost = scene.engine("engine-0")
        await lost.deliver(segments=[segment("a", 0, 2)])
        scene.gone.add("node of engine-0")
        lost.die()
        await scene.until(lambda: ("engine-0", "leave", "its node is gone") in scene.changes)
        scene.gone.clear()
        await scene.until(lambda: scene.serving == ["engine-0"])
        await turns()
        (asked,) = scene.engine("engine-0").submitted
        assert asked.generated == 2
        assert not scene.notes, "otherwise the run would have ended, because no restart is allowed"


async def test_an_engine_that_cannot_join_is_requested_again_and_the_run_continues() -> None:
    async with pooled(1, 2, room=0) as scene:
        scene.failing = 2
        for _ in range(3):
            scene.room.release()
        await scene.until(lambda: len(scene.serving) == 2)
        assert [(name, message) for _, name, message in scene.notes] == [
            ("engine-1", "it could not join: it does not start")
        ] * 2


async def test_a_run_without_an_engine_says_what_it_waits_for() -> None:
    async with pooled(1, 1, room=0) as scene:
        assert scene.pool.shortage() == ""
        scene.gone.add("node of engine-0")
        scene.engine("engine-0").die()
        await scene.until(lambda: scene.pool.shortage().endswith("no room"))
        assert scene.pool.shortage() == "no engine serves; engine-0 waits until Ray has room for it: no room"
        await scene.until(lambda: scene.counts[-1] == (0, 1))
        await scene.ask("a")
        scene.room.release()
        await scene.until(lambda: scene.serving == ["engine-0"])
        await turns()
        assert scene.engine("engine-0").ids == ["a"]
