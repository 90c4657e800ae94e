"""The task ``harbor``: images are built before a start, agents work in them, and hidden tests give the reward."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.sandbox.commands import CommandResult, Stopped
from asyncrl_cli.spec.inputs import SandboxSpec, TaskSpec
from asyncrl_cli.tasks.base import ModelAccess, RewardResult
from asyncrl_cli.tasks.episode_sandbox import check_images, episode_sandbox
from asyncrl_cli.tasks.load import load_task
from asyncrl_cli.tasks.ready.harbor import LOGS, Harbor, VerifierFailed, parsed_reward
from tests.sandbox.kinds import busybox_container

ACCESS = ModelAccess("http://127.0.0.1:9/v1", "key", "policy", "rollout")
TEST = """#!/bin/sh
[ "$MODE" = strict ] || exit 1
if [ "$(cat answer)" = "$(cat /tests/expected)" ]; then reward=1; else reward=0; fi
echo "{\\"reward\\": $reward, \\"files\\": $(ls | wc -l)}" > /logs/verifier/reward.json
"""
CHEAT = "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo 1 > answer; echo 1 > /tests/expected"


@pytest.fixture(scope="module")
def settings() -> Iterator[SandboxSpec]:
    with busybox_container("harbor") as container:
        yield container.model_copy(update={"image": "{image}"})


@pytest.fixture
def folder(tmp_path: Path, settings: SandboxSpec, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A spec's folder with one task, whose image is removed afterwards."""
    repository = f"localhost/asyncrl-test-harbor-{os.getpid()}"  # other suites and users keep their images
    monkeypatch.setattr("asyncrl_cli.tasks.ready.harbor.REPOSITORY", repository)
    task = tmp_path / "tasks" / "sum"
    for name, text in {
        "task.toml": '[verifier]\ntimeout_sec = 60.0\nenv = {MODE = "strict"}\n',
        "instruction.md": "Write the sum of the numbers in data to the file answer.\n",
        "environment/Dockerfile": f"FROM localhost/asyncrl-test-{os.getpid()}:harbor\nWORKDIR /app\nCOPY data .\n",
        "environment/data": "40\n2\n",
        "tests/test.sh": TEST,
        "tests/expected": "42\n",
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    (tmp_path / "my_agent.py").write_text(
        "async def solve(prompt, model, sandbox):\n"
        "    assert 'image' not in prompt and prompt['prompt'].startswith('Write the sum')\n"
        "    assert (await sandbox.run('pwd; ls; ls /tests')).output.startswith('/app\\ndata\\nls: /tests')\n"
        "    await sandbox.run('echo $(( $(head -n 1 data) + $(tail -n 1 data) )) > answer')\n"
    )
    yield tmp_path
    images = ["podman", "images", "--quiet", repository]
    for image in subprocess.run(images, capture_output=True, text=True, check=True).stdout.split():
        subprocess.run(["podman", "rmi", "--force", image], capture_output=True, check=False)


def loaded_task(folder: Path, settings: SandboxSpec, **options: Any) -> Any:
    spec = TaskSpec(use="harbor", options={"tasks": "tasks", **options}, sandbox=settings)
    return load_task(spec, folder)


def played(task: Any, prompt: Prompt, settings: SandboxSpec) -> RewardResult:
    async def episode() -> RewardResult:
        async with episode_sandbox(task, settings, ACCESS.base_url, prompt) as sandbox:
            result: RewardResult = await task.run(prompt, ACCESS, sandbox)
            return result

    return asyncio.run(episode())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reward"),
    [
        ({"agent": "my_agent:solve"}, 1.0),
        ({"command": "test -d cwd || echo 42 > answer; echo $OPENAI_API_KEY > /dev/null"}, 1.0),
        ({"command": CHEAT}, 0.0),
    ],
)
def test_hidden_tests_score_what_an_agent_left(
    folder: Path, settings: SandboxSpec, options: dict[str, Any], reward: float
) -> None:
    task = loaded_task(folder, settings, **options)
    (prompt,) = task.prompts("train", 1)
    assert prompt.content == "Write the sum of the numbers in data to the file answer."
    assert task.prompts("train", 1) == [prompt]  # its image is there
    assert check_images(settings, [[prompt]], "task") == "1 image, 1 tried"
    assert played(task, prompt, settings) == RewardResult(reward, {"files": 2.0})


@pytest.mark.slow
def test_tests_without_a_reward_fail_the_episode(folder: Path, settings: SandboxSpec) -> None:
    (folder / "tasks/sum/tests/test.sh").write_text("#!/bin/sh\necho no internet; exit 3\n")
    task = loaded_task(folder, settings, command="true")
    (prompt,) = task.prompts("train", 1)
    with pytest.raises(VerifierFailed, match="ended with status 3 and wrote no reward: no internet"):
        played(task, prompt, settings)


@pytest.mark.slow
def test_a_task_that_cannot_be_played_is_refused(folder: Path, settings: SandboxSpec) -> None:
    task = loaded_task(folder, settings, command="true")

    def refused(words: str, split: str = "train", size: int = 1) -> None:
        with pytest.raises(TaskError, match=words):
            task.prompts(split, size)

    refused("has 1 tasks", size=2)
    refused("no tasks to evaluate on", "eval")
    (folder / "tasks/sum/environment/Dockerfile").write_text("FROM localhost/missing:1\n")
    refused("Dockerfile cannot be built")
    (folder / "tasks/sum/task.toml").write_text("[environment]\ngpus = 1\n")
    refused("environment.gpus")
    with pytest.raises(TaskError, match="one of `command` and `agent`"):
        loaded_task(folder, settings)


@pytest.mark.parametrize(
    ("name", "text", "result"),
    [
        ("reward.txt", " 0.5\n", RewardResult(0.5)),
        ("reward.json", '{"reward": 1, "speed": 2.5}', RewardResult(1.0, {"speed": 2.5})),
        ("reward.json", '{"accuracy": 0.25}', RewardResult(0.25)),
        ("reward.json", '{"a": 1, "b": 2}', None),
        ("reward.json", "[1]", None),
        ("reward.txt", "", None),
    ],
)
def test_a_reward_file_is_read(name: str, text: str, result: RewardResult | None) -> None:
    if result is not None:
        assert parsed_reward(name, text) == result
        return
    with pytest.raises(VerifierFailed, match="has no reward"):
        parsed_reward(name, text)


class ContainerStub:
    """A container: test.sh leaves the given files of rewards, and the agent's command may reach a limit."""

    base_url = None
    scratch = "/scratch"

    def __init__(self, reward_files: dict[str, str], stopped: Stopped = "") -> None:
        self.reward_files = reward_files
        self.stopped = stopped

    async def run(self, command: str, errors_apart: bool = False, **_: Any) -> CommandResult:
        """Only the agent's command has its errors apart."""
        return CommandResult(None, "", self.stopped) if self.stopped and errors_apart else CommandResult(0, "")

    async def write_file(self, path: str, data: bytes) -> None:
        pass

    async def read_file(self, path: str) -> bytes:
        try:
            return self.reward_files[path.removeprefix(f"{LOGS}/")].encode()
        except KeyError:
            raise FileNotFoundError(path) from None


def played_in_stub(folder: Path, sandbox: ContainerStub) -> RewardResult:
    (folder / "sum/tests").mkdir(parents=True)
    (folder / "sum/task.toml").touch()
    prompt = Prompt("harbor/train/sum", "Write the sum.", {"task": "sum"})
    return asyncio.run(Harbor(str(folder), command="true").run(prompt, ACCESS, sandbox))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("json_text", "number", "result"),
    [
        ('{"reward": 1}', "0", RewardResult(0.0)),
        ('{"reward": 0, "files": 2}', "1", RewardResult(0.0, {"files": 2.0})),
        ('{"reward": 1, "files": 2}', "1", RewardResult(1.0, {"files": 2.0})),
    ],
)
def test_of_two_reward_files_the_smaller_reward_counts(
    tmp_path: Path, json_text: str, number: str, result: RewardResult
) -> None:
    assert played_in_stub(tmp_path, ContainerStub({"reward.json": json_text, "reward.txt": number})) == result


@pytest.mark.parametrize("limit", ["memory", "processes", "disk"])
def test_tests_judge_an_agent_that_reached_a_limit(tmp_path: Path, limit: Stopped) -> None:
    assert played_in_stub(tmp_path, ContainerStub({"reward.txt": "0"}, stopped=limit)) == RewardResult(0.0)
