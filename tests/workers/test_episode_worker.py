"""Whatever an agent does to its own episode, others are not affected."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.tasks.base import ModelAccess
from asyncrl_cli.workers.actors import EpisodeActor
from asyncrl_cli.workers.messages import Played, Retry
from asyncrl_cli.workers.process import CHUNK

pytestmark = pytest.mark.slow

AGENTS = """
    import asyncio, ctypes, os, subprocess, sys, time
    import __main__
    from asyncrl_cli.workers import episode_player

    __main__.BEAT_S, episode_player.GRACE_S = 0.1, 0.5  # of the worker process
    BEGUN = []

    async def agent(row, model):
        names = {"row": row, "model": model}
        body = "\\n    ".join(row["prompt"].splitlines())
        exec(f"async def play():\\n    {body}", globals() | names, names)
        return await names["play"]()

    class Slow:
        def __init__(self, prompt):
            self.seconds = prompt["seconds"]
        def reset(self):
            time.sleep(self.seconds)
            raise RuntimeError("it has slept")
        def step(self, reply):
            raise NotImplementedError
"""
WAITS = "await asyncio.sleep(600)"
WAITS_FOR_100 = """
BEGUN.append(row["uid"])
while len(BEGUN) < 100: await asyncio.sleep(0.01)
return 1
"""
SOON = "await asyncio.sleep(0.5); return 0.5"
ACCESS = ModelAccess("http://127.0.0.1:9/sessions/1-0/v1", "key", "policy", "1-0")
PID = "return os.getpid()"


class Harness:
    """An actor, and the results of its episodes."""

    def __init__(self, actor: EpisodeActor) -> None:
        self.actor = actor
        self._count = 0

    async def play(self, *codes: str, apart: bool = False, **fields: Any) -> list[Played]:
        """The results of simultaneous episodes with these prompts."""
        first, self._count = self._count, self._count + len(codes)
        plays = (
            self.actor.play(f"{first + index}", Prompt(f"row/{index}", code, fields), ACCESS, apart)
            for index, code in enumerate(codes)
        )
        return await asyncio.gather(*plays)

    async def pid(self) -> int:
        (played,) = await self.play(PID)
        assert isinstance(played.score, Scored)
        return int(played.score.reward)


@asynccontextmanager
async def episode_worker(
    folder: Path, use: str = "agents:agent", blocked_s: float = 30.0, **limits: Any
) -> AsyncIterator[Harness]:
    (folder / "agents.py").write_text(textwrap.dedent(AGENTS))
    with patch("asyncrl_cli.workers.actors.redirect_output"):
        one = EpisodeActor("episode-worker-0", TaskSpec(use=use, episode=limits), str(folder), "", blocked_s)
    try:
        yield Harness(one)
    finally:
        await one.stop()


def reason(played: Played) -> str:
    assert isinstance(played.score, RewardFailure)
    return played.score.reason


async def test_many_episodes_run_in_one_process_and_each_has_its_own_result(tmp_path: Path) -> None:
    async with episode_worker(tmp_path) as actor:
        assert await actor.actor.start() == "agents:agent"
        pid = await actor.pid()
        fine, raises, leaves, none, wrong = await actor.play(
            "return 1", "raise ValueError('no idea')", "sys.exit(3)", "return None", "return 'a lot'"
        )
        assert fine == Played(Scored(1.0))
        assert reason(raises) == "agents:agent failed on prompt 'row/1': ValueError: no idea"
        assert "SystemExit: 3" in reason(leaves)
        assert none == Played(None)
        assert "returned 'a lot'" in reason(wrong)
        assert [one.retry for one in (raises, leaves, wrong)] == [Retry.RESTART] * 3
        assert await actor.play(*[WAITS_FOR_100] * 100) == [Played(Scored(1.0))] * 100, "at the same time"
        assert await actor.pid() == pid


@pytest.mark.parametrize("hangs", [WAITS, "await asyncio.to_thread(time.sleep, 600)"])
async def test_an_episode_that_does_not_end_fails_and_others_continue(tmp_path: Path, hangs: str) -> None:
    async with episode_worker(tmp_path, timeout_s=1.0) as actor:
        pid = await actor.pid()
        late, fine = await actor.play(hangs, SOON)
        assert (late.retry, fine.score) == (Retry.NONE, Scored(0.5))
        assert reason(late) == "agents:agent: the episode of prompt 'row/0' failed: it had not ended after 1 s"
        replaced = await actor.pid() != pid
        assert replaced == ("to_thread" in hangs), "a process with a thread that hangs is retired"
        assert psutil.pid_exists(pid) != replaced


async def test_tasks_that_an_episode_leaves_running_are_cancelled(tmp_path: Path) -> None:
    async with episode_worker(tmp_path) as actor:
        await actor.play(f"asyncio.create_task(asyncio.sleep(600)); {PID}")
        (played,) = await actor.play("return len(asyncio.all_tasks())")
        (again,) = await actor.play("return len(asyncio.all_tasks())")
        assert played == again


async def test_an_episode_that_blocks_the_loop_fails_and_others_are_resumed(tmp_path: Path) -> None:
    async with episode_worker(tmp_path, blocked_s=1.0) as actor:
        pid = await actor.pid()
        blocks, other = await actor.play("time.sleep(600)", WAITS)
        assert (blocks.retry, other.retry) == (Retry.NONE, Retry.RESUME)
        assert "the episode blocked the event loop for 1 s" in reason(blocks)
        assert await actor.pid() != pid


@pytest.mark.parametrize(
    ("ends", "how"),
    [
        ("os._exit(4)", "its process ended (exit status 4)"),
        pytest.param("ctypes.string_at(0)", "signal SIGSEGV", marks=pytest.mark.rotating),
        ("os.closerange(3, 4096); await asyncio.sleep(600)", "its process "),
        ("ctypes.PyDLL(None).sleep(600)", "gave no sign of life"),
    ],
    ids=["exits", "crashes", "closes its socket", "holds the lock in C"],
)
async def test_episodes_of_a_lost_process_are_isolated_which_shows_the_cause(
    tmp_path: Path, ends: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl_cli.workers.process.SILENT_S", 1.0)
    monkeypatch.setattr("asyncrl_cli.workers.process.BEAT_S", 0.1)
    async with episode_worker(tmp_path, blocked_s=1.0) as actor:
        both = await actor.play(ends, WAITS)
        assert [one.retry for one in both] == [Retry.ISOLATED, Retry.ISOLATED]
        assert how in reason(both[0])
        guilty, innocent = await actor.play(ends, "return 1", apart=True)
        assert (guilty.retry, innocent.score) == (Retry.RESTART, Scored(1.0))
        assert how in reason(guilty)
        await actor.pid()


async def test_memory_has_a_limit(tmp_path: Path) -> None:
    async with episode_worker(tmp_path, memory_mb=4096) as actor:
        (played,) = await actor.play("return len(bytearray(2**33))")
        assert "MemoryError" in reason(played)
        await actor.pid()


async def test_output_is_logged_and_the_log_is_bounded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with patch("asyncrl_cli.workers.process.bound_log") as bound:
        async with episode_worker(tmp_path) as actor:
            (played,) = await actor.play("print('x' * 3_000_000); return 1")
            assert played.score == Scored(1.0)
    assert capfd.readouterr().out.count("x") >= 3_000_000
    assert bound.call_count >= 3_000_000 / CHUNK


async def test_a_slow_environment_does_not_delay_others(tmp_path: Path) -> None:
    async with episode_worker(tmp_path, use="agents:Slow") as actor:
        ended: list[float] = []

        async def one(seconds: float) -> None:
            (played,) = await actor.play("", seconds=seconds)
            assert "it has slept" in reason(played)
            ended.append(seconds)

        await asyncio.gather(one(0.5), one(0.0), one(0.1))
        assert ended == [0.0, 0.1, 0.5]


async def test_a_cancelled_episode_stops(tmp_path: Path) -> None:
    async with episode_worker(tmp_path) as actor:
        code = f"""
try:
    {WAITS}
finally:
    open({str(tmp_path / "stopped")!r}, "w").close()"""
        playing = asyncio.create_task(actor.actor.play("mine", Prompt("row", code), ACCESS, False))
        await actor.pid()
        await actor.actor.cancel(["mine"])
        assert reason(await playing) == "it was cancelled"
        await actor.play("return 1")  # it runs after the cancelled one
        assert (tmp_path / "stopped").exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("", "has no 'agent'"),
        ("import os; os._exit(9)", r"loading broken:agent failed: its process ended \(exit status 9\)"),
        # Other modules that the process imports, which may fail because of its memory limit.
        (
            "import sys; sys.modules['aiohttp'] = None\nasync def agent(row, model): ...",
            r"loading broken:agent failed: its process ended \(exit status 1\)",
        ),
    ],
)
async def test_a_task_that_cannot_be_loaded_is_refused(tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "broken.py").write_text(code)
    async with episode_worker(tmp_path, "broken:agent") as worker:
        with pytest.raises(TaskError, match=message):
            await worker.actor.start()
