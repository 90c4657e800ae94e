"""Whatever a reward does to its own process, its owner continues."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.workers.messages import Load
from asyncrl_cli.workers.process import ProcessLost, WorkerProcess
from asyncrl_cli.workers.scoring import Response

pytestmark = pytest.mark.slow

REWARDS = """
    import ctypes, os, re, signal, subprocess, sys, time

    def reward(prompt, response):
        print("scoring", response)
        if response.startswith("pid"):
            return os.getpid()
        if response == "alarm":
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            try:
                signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
                time.sleep(60)
            except ZeroDivisionError:
                return 0.25
        if response == "forked":  # a child that keeps the socket open
            if os.fork() == 0:
                time.sleep(600)
            os._exit(4)
        exec(response)
        return 1.0
"""
HANGS = {
    "sleeps": "time.sleep(600)",
    "is busy": "while True: pass",
    "holds the lock in C": "ctypes.PyDLL(None).sleep(600)",
    "backtracks without end": "re.match('(a+)+$', 'a' * 60 + 'b')",
    "ignores signals": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)); time.sleep(600)",
    "closes its socket": "os.closerange(3, 4096); time.sleep(600)",
}


def response(text: str) -> Response:
    return Prompt("row/7", "?"), text, True


class Harness:
    """A process and its event loop."""

    def __init__(self, loop: asyncio.Runner, spec: TaskSpec, folder: Path) -> None:
        self._loop = loop
        self._limit_s = spec.reward_timeout_s
        self.process = WorkerProcess(Load(spec, folder, None, 30.0))
        loop.run(self.process.start())

    def score(self, text: str, limit_s: float | None = None) -> float | RewardFailure:
        scored = self._loop.run(self.process.score(response(text), limit_s or self._limit_s))
        return scored.reward if isinstance(scored, Scored) else scored

    def pid(self) -> int:
        pid = self.score("pid", limit_s=60.0)  # whatever the limit of the test's own reward
        assert isinstance(pid, float)
        return int(pid)

    @property
    def usable(self) -> bool:
        return self.process.usable

    def close(self) -> None:
        async def close() -> None:
            self.process.close("the test ends")

        self._loop.run(close())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Harness]]:
    (tmp_path / "user_rewards.py").write_text(textwrap.dedent(REWARDS))
    started = []

    with asyncio.Runner() as loop:

        def make(limit_s: float = 60.0, use: str = "user_rewards:reward", **limits: int) -> Harness:
            process = Harness(loop, TaskSpec(use=use, reward_timeout_s=limit_s, **limits), tmp_path)
            started.append(process)
            return process

        yield make
        for process in started:
            process.close()


def test_one_process_scores_until_it_is_closed(start: Callable[..., Harness]) -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGUSR1))  # as in Ray's workers
    process = start()
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert process.process.task_info.names == {"": "user_rewards:reward"}
    pid = process.pid()
    assert pid != os.getpid()
    assert process.score("pid again") == pid
    assert process.score("x" * 10**6 + " = 1") == 1.0, "more than the buffer of a pipe"
    assert process.score("alarm") == 0.25, "signals work as in any main thread"
    assert process.score("assert '127.0.0.1' in os.environ['no_proxy']") == 1.0
    assert process.score("assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())") == 1.0
    assert process.usable
    process.close()
    assert not process.usable
    assert not psutil.pid_exists(pid)


ALWAYS = ("holds the lock in C", "closes its socket")


@pytest.mark.parametrize(
    "hang",
    [pytest.param(hang, id=name, marks=() if name in ALWAYS else pytest.mark.rotating) for name, hang in HANGS.items()],
)
def test_a_reward_that_hangs_is_killed(start: Callable[..., Harness], hang: str) -> None:
    process = start(0.5)
    pid = process.pid()
    failure = process.score(hang)
    assert isinstance(failure, RewardFailure)
    assert failure.reason == "user_rewards:reward took more than 0.5 s on prompt 'row/7'"
    assert "user_rewards.py:" in failure.location
    assert not process.usable
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("os._exit(3)", "exit status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL"),
        ("ctypes.string_at(0)", "signal SIGSEGV"),
        ("forked", "exit status 4"),
        ("os.closerange(3, 4096)", "exit status 1"),
        ("os.closerange(3, 4096); time.sleep(0.6)", "exit status 1"),  # at any time within its limit
    ],
)
def test_how_the_process_ended_is_reported(
    start: Callable[..., Harness], end: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl_cli.workers.process.LAST_S", 0.2)
    process = start()
    with pytest.raises(ProcessLost, match=how):
        process.score(end)
    assert not process.usable


def test_memory_has_a_limit_and_the_process_continues(start: Callable[..., Harness]) -> None:
    process = start(reward_memory_mb=300)
    failure = process.score("bytearray(2**29)")
    assert isinstance(failure, RewardFailure)
    assert failure.reason.endswith("MemoryError: (its process may take 300 MiB)")
    assert process.score("1") == 1.0


def test_the_temporary_folder_of_a_killed_process_is_removed(start: Callable[..., Harness], tmp_path: Path) -> None:
    process, name = start(1.0), tmp_path / "name"
    code = f"import tempfile; open({str(name)!r}, 'w').write(tempfile.mkdtemp()); time.sleep(600)"
    assert isinstance(process.score(code), RewardFailure)
    assert not Path(name.read_text()).exists()


def test_a_process_that_died_idle_is_not_usable(start: Callable[..., Harness]) -> None:
    process = start()
    pid = process.pid()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ProcessLost):
        process.score("1")
    assert not process.usable


def test_reward_process_dies_with_its_owner(tmp_path: Path) -> None:
    """Also if the owner is killed while the reward is in a loop in C code."""
    (tmp_path / "user_rewards.py").write_text(textwrap.dedent(REWARDS))
    code = f"""if True:
        import asyncio; from pathlib import Path; from asyncrl_cli.records.prompt import Prompt
        from asyncrl_cli.spec.inputs import TaskSpec
        from asyncrl_cli.workers.messages import Load
        from asyncrl_cli.workers.process import WorkerProcess
        async def main():
            load = Load(TaskSpec(use='user_rewards:reward'), Path({str(tmp_path)!r}), None, 30.0)
            process = WorkerProcess(load)
            await process.start()
            print((await process.score((Prompt('a', ''), 'pid', True), 60)).reward, flush=True)
            await process.score((Prompt('a', ''), {HANGS["holds the lock in C"]!r}, True), 60)
        asyncio.run(main())
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},  # a killed owner does not remove its files
    )
    assert owner.stdout is not None
    lines = iter(owner.stdout.readline, "")
    pid = next(int(float(line)) for line in lines if not line.startswith("scoring"))
    reward = psutil.Process(pid)
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert psutil.wait_procs([reward], 10)[1] == []
