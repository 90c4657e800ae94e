"""Several processes, several async rewards in each; a reward that fails does not affect the others."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.spec.inputs import TaskMember, TaskSpec
from asyncrl_cli.workers.actors import RewardActor
from asyncrl_cli.workers.scoring import Response

pytestmark = pytest.mark.slow

REWARDS = """
    import asyncio, os, subprocess, time
    from pathlib import Path
    from asyncrl_cli.tasks.base import RewardResult

    here = Path(__file__).parent
    waiting = []

    def plain(prompt, response):
        exec(response)
        return os.getpid()

    async def together(prompt, response):  # waits until ``count`` of them wait
        if response.startswith("wait for "):
            waiting.append(response)
            while len(waiting) < int(response.removeprefix("wait for ")):
                await asyncio.sleep(0.01)
        elif response == "never":
            await asyncio.Event().wait()
        else:
            exec(response)
        return RewardResult(1.0, {"pid": os.getpid()})

    def leaves(prompt, response):  # a process in a session of its own, whose parent ends
        line = "setsid sleep 600 > /dev/null 2>&1 & echo $!"
        started = subprocess.run(line, shell=True, stdout=subprocess.PIPE, text=True)
        (here / "left").write_text(started.stdout)
        time.sleep(600)

    def meet(prompt, response):  # waits until so many processes have come
        (here / str(os.getpid())).touch()
        while len([name for name in os.listdir(here) if name.isdecimal()]) < int(response):
            time.sleep(0.01)
        return float(prompt["index"])
"""


@pytest.fixture
def score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Scored | RewardFailure]]:
    """A function with which a new actor scores responses, all at the same time."""
    (tmp_path / "user_rewards.py").write_text(textwrap.dedent(REWARDS))
    monkeypatch.setattr("asyncrl_cli.workers.actors.redirect_output", lambda *_: None)

    def score_all(texts: list[str], **task: Any) -> list[Scored | RewardFailure]:
        def response(index: int, text: str) -> Response:
            name, _, code = text.partition("/") if "mix" in task else ("row", "/", text)
            return Prompt(f"{name}/{index}", "?", {"index": index}), code, True

        responses = [response(index, text) for index, text in enumerate(texts)]

        async def run() -> list[Scored | RewardFailure]:
            scorer = RewardActor("scorer", TaskSpec(**task), str(tmp_path), str(tmp_path))
            try:
                await scorer.start()
                return await asyncio.wait_for(scorer.score(responses), 60)
            finally:
                await scorer.stop()

        return asyncio.run(run())

    return score_all


def test_processes_share_the_work_and_the_order_is_kept(score: Any) -> None:
    scored = score(["2"] * 8, use="user_rewards:meet", reward_workers=2)
    assert scored == [Scored(float(index)) for index in range(8)]


def test_async_rewards_run_concurrently_in_one_process(score: Any) -> None:
    scored = score(["wait for 4"] * 4, use="user_rewards:together", reward_concurrency=4, reward_timeout_s=30.0)
    assert [result.reward for result in scored] == [1.0] * 4
    assert len({result.metrics["pid"] for result in scored}) == 1


def test_an_async_reward_that_takes_too_long_does_not_affect_others(score: Any) -> None:
    texts = ["never", "1", "never", "1"]
    scored = score(texts, use="user_rewards:together", reward_concurrency=2, reward_timeout_s=0.5)
    assert [isinstance(result, Scored) for result in scored] == [False, True, False, True]
    assert scored[0].reason == "user_rewards:together took more than 0.5 s on prompt 'row/0'"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("os._exit(3)", "failed twice on prompt 'row/2': its process ended (exit status 3)"),
        ("time.sleep(60)", "took more than 0.5 s on prompt 'row/2'"),
    ],
)
def test_only_the_reward_that_fails_is_lost(
    score: Any, fault: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five rewards wait in one process; one of them kills the process."""
    monkeypatch.setattr("asyncrl_cli.workers.process.ASYNC_GRACE_S", 0.5)
    texts = ["await_ = 1", "1", fault, "1", "1"]
    scored = score(texts, use="user_rewards:together", reward_concurrency=5, reward_timeout_s=0.5)
    assert [index for index, result in enumerate(scored) if isinstance(result, RewardFailure)] == [2]
    assert scored[2].reason == f"user_rewards:together {reason}"


def test_a_mix_has_a_limit_per_task_and_may_have_plain_and_async_rewards(score: Any) -> None:
    mix = [
        TaskMember(name="slow", use="user_rewards:plain"),
        TaskMember(name="quick", use="user_rewards:plain", reward_timeout_s=0.3),
        TaskMember(name="judge", use="user_rewards:together"),
    ]
    texts = ["judge/1", "slow/time.sleep(0.5)", "quick/time.sleep(30)", "judge/1", "slow/1"]
    scored = score(texts, mix=mix)
    assert scored[2].reason == "user_rewards:plain took more than 0.3 s on prompt 'quick/2'"
    assert "user_rewards.py:" in scored[2].location
    assert [isinstance(result, Scored) for result in scored] == [True, True, False, True, True]


def test_processes_that_a_reward_has_started_end_with_it_in_any_session(score: Any, tmp_path: Path) -> None:
    (failure,) = score(["1"], use="user_rewards:leaves", reward_timeout_s=1.0)
    assert isinstance(failure, RewardFailure)
    assert not psutil.pid_exists(int((tmp_path / "left").read_text()))
