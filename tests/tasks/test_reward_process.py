"""A reward may do what it likes to its own process, and to no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.spec.sections import TaskSpec
from asyncrl_cli.tasks.errors import TaskError
from asyncrl_cli.tasks.reward_process import ProcessEnded, RewardProcess
from asyncrl_cli.tasks.scoring import Response, RewardFailure

REWARDS = """
    import ctypes, os, re, signal, subprocess, sys, time

    def reward(prompt, response):
        print("scoring", response)
        if response.startswith("pid"):
            return os.getpid()
        if response == "child":
            return subprocess.Popen(["sleep", "600"]).pid
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
    "backtracks for ever": "re.match('(a+)+$', 'a' * 60 + 'b')",
    "ignores signals": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)); time.sleep(600)",
    "closes its socket": "os.closerange(3, 4096); time.sleep(600)",
}


def response(text: str) -> Response:
    return Prompt("row/7", "?"), text, True


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RewardProcess]]:
    (tmp_path / "user_rewards.py").write_text(textwrap.dedent(REWARDS))
    started = []

    def make(limit_s: float = 60.0, use: str = "user_rewards:reward") -> RewardProcess:
        process = RewardProcess(TaskSpec(use=use, reward_timeout_s=limit_s), tmp_path)
        started.append(process)
        return process

    yield make
    for process in started:
        process.close()


def test_one_process_scores_until_it_is_closed(start: Callable[..., RewardProcess]) -> None:
    process = start()
    assert process.name == "user_rewards:reward"
    pid = process.score(response("pid"))
    assert isinstance(pid, float) and pid != os.getpid()
    assert process.score(response("pid again")) == pid
    assert process.score(response("x" * 10**6 + " = 1")) == 1.0, "what fits in no pipe's buffer"
    assert process.score(response("alarm")) == 0.25, "signals work as in any main thread"
    assert process.alive
    process.close()
    assert not process.alive
    assert not psutil.pid_exists(int(pid))


def test_what_raises_costs_nothing(start: Callable[..., RewardProcess]) -> None:
    process = start()
    for text in ("raise ValueError('no such answer')", "sys.exit(1)"):
        assert isinstance(process.score(response(text)), RewardFailure)
    assert process.alive


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
def test_what_hangs_is_ended(start: Callable[..., RewardProcess], hang: str) -> None:
    process = start(0.5)
    pid = process.score(response("pid"))
    assert isinstance(pid, float)
    assert process.score(response(hang)) == RewardFailure("user_rewards:reward took more than 0.5 s on prompt 'row/7'")
    assert not process.alive
    assert not psutil.pid_exists(int(pid))


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("os._exit(3)", "exit status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL"),
        ("ctypes.string_at(0)", "signal SIGSEGV"),
        ("forked", "exit status 4"),
        ("os.closerange(3, 4096)", "exit status 1"),
        ("os.closerange(3, 4096); time.sleep(2)", "exit status 1"),  # as late as it likes, within its limit
    ],
)
def test_what_ends_the_process_is_told(start: Callable[..., RewardProcess], end: str, how: str) -> None:
    process = start()
    with pytest.raises(ProcessEnded, match=how):
        process.score(response(end))
    assert not process.alive


def test_what_the_reward_has_started_ends_with_it(start: Callable[..., RewardProcess]) -> None:
    process = start(0.5)
    child = process.score(response("child"))
    assert isinstance(child, float)
    sleeping = psutil.Process(int(child))
    process.score(response(HANGS["sleeps"]))
    assert psutil.wait_procs([sleeping], 10)[1] == []


def test_a_process_that_died_idle_is_not_alive(start: Callable[..., RewardProcess]) -> None:
    process = start()
    pid = process.score(response("pid"))
    assert isinstance(pid, float)
    os.kill(int(pid), signal.SIGKILL)
    with pytest.raises(ProcessEnded):
        process.score(response("1"))
    assert not process.alive


def test_a_task_that_cannot_be_loaded_is_refused(start: Callable[..., RewardProcess], tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no module 'absent'"):
        start(use="absent:reward")
    (tmp_path / "leaves.py").write_text("import os; os._exit(9)")
    with pytest.raises(TaskError, match=r"loading the task ended its process \(exit status 9\)"):
        start(use="leaves:reward")


def test_it_dies_with_its_owner(tmp_path: Path) -> None:
    """Also when the owner is killed while the reward spins in C."""
    (tmp_path / "user_rewards.py").write_text(textwrap.dedent(REWARDS))
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from asyncrl_cli.data.prompts import Prompt\n"
            "from asyncrl_cli.spec.sections import TaskSpec\n"
            "from asyncrl_cli.tasks.reward_process import RewardProcess\n"
            f"process = RewardProcess(TaskSpec(use='user_rewards:reward'), Path({str(tmp_path)!r}))\n"
            "print(process.score((Prompt('a', ''), 'pid', True)), flush=True)\n"
            f"process.score((Prompt('a', ''), {HANGS['holds the lock in C']!r}, True))\n",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    lines = iter(owner.stdout.readline, "")
    pid = next(int(float(line)) for line in lines if not line.startswith("scoring"))
    reward = psutil.Process(pid)
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert psutil.wait_procs([reward], 10)[1] == []
