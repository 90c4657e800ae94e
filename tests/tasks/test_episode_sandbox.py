"""Tasks get an episode's sandbox if they have a parameter for it; a sandbox that a task cannot use is refused."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure
from asyncrl_cli.spec.inputs import SandboxSpec, TaskSpec
from asyncrl_cli.tasks.base import SPEC_FOLDER, ModelAccess
from asyncrl_cli.tasks.load import load_task
from asyncrl_cli.workers.episode_player import EpisodePlayer
from asyncrl_cli.workers.messages import Play, Played
from tests.sandbox.kinds import NEEDS_BUBBLEWRAP, SilentHandler, serving

pytestmark = [pytest.mark.slow, NEEDS_BUBBLEWRAP]

TASKS = '''
import os
from asyncrl_cli.tasks.base import RewardResult, Step
from asyncrl_cli.tasks.tools import ToolTask

async def agent(row, model, sandbox):
    result = await sandbox.run("pwd; echo $OPENAI_BASE_URL")
    assert result.output == "/sandbox\\nhttp://127.0.0.1:18181/v1\\n", result
    return 0.5

async def plain(row, model):
    return 1.0

async def either(row, model, sandbox=None):
    return 0.25 if sandbox is None else 0.75

class Agent:
    async def run(self, prompt, model, sandbox):
        await sandbox.write_file("a", prompt.uid.encode())
        return float((await sandbox.run("wc -c < a")).output)

class Place:
    def __init__(self, prompt, sandbox, size=1):
        self.sandbox, self.size = sandbox, size
    def reset(self):
        self.sandbox.write_file("f", b"x" * self.size)
        return [{"role": "user", "content": "go"}]
    def step(self, reply):
        return Step(reward=float(self.sandbox.run("wc -c < f").output), done=True)

class Shell(ToolTask):
    def tools(self, prompt, sandbox):
        def shell(command: str) -> str:
            """Run a command."""
            return sandbox.run(command).output
        return [shell]
    def judge(self, prompt, text, sandbox):
        return RewardResult(float(sandbox.read_file("answer") == b"42\\n"))

class OnlyJudge(ToolTask):
    def tools(self, prompt):
        return []
    def judge(self, prompt, text, sandbox):
        return float(sandbox.run("exit 7").status)

class WithoutSandbox(ToolTask):
    def tools(self, prompt):
        return []
    def judge(self, prompt, text):
        return 1.0
'''


class Model(SilentHandler):
    """A model that calls the tool `shell` once, and then answers."""

    def do_POST(self) -> None:
        asked = json.loads(self.body())
        call = {
            "id": "1",
            "type": "function",
            "function": {"name": "shell", "arguments": '{"command": "echo 42 >answer"}'},
        }
        message: dict[str, Any] = {"role": "assistant", "content": "done"}
        if asked.get("tools") and asked["messages"][-1]["role"] == "user":
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        self.answer(json.dumps({"choices": [{"message": message}]}).encode())


@pytest.fixture(scope="module")
def access() -> Iterator[ModelAccess]:
    with serving(Model) as address:
        yield ModelAccess(f"{address}/v1", "key", "policy", "1-0")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for parent in (tmp_path, tmp_path.parent):
        parent.chmod(0o755)
    (tmp_path / "sandboxed_tasks.py").write_text(textwrap.dedent(TASKS))
    monkeypatch.setenv(SPEC_FOLDER, str(tmp_path))
    return tmp_path


def play(folder: Path, access: ModelAccess, spec: dict[str, Any], timeout_s: float = 60.0) -> Played:
    loaded = TaskSpec.model_validate(spec)
    task = load_task(loaded, folder)

    async def once() -> Played:
        player = EpisodePlayer(task, timeout_s, loaded.sandbox)
        try:
            return await player.play(1, Play(Prompt("row/1", "hello", {"answer": "42"}), access))
        finally:
            await player._http.close()

    return asyncio.run(once())


@pytest.mark.parametrize(
    ("use", "reward"),
    [("agent", 0.5), ("either", 0.75), ("Agent", 5.0), ("Place", 1.0), ("Shell", 1.0), ("OnlyJudge", 7.0)],
)
def test_a_parameter_sandbox_gets_it(folder: Path, access: ModelAccess, use: str, reward: float) -> None:
    played = play(folder, access, {"use": f"sandboxed_tasks:{use}", "sandbox": {}})
    assert not isinstance(played.score, RewardFailure), played
    assert played.score is not None
    assert played.score.reward == reward


def test_a_task_that_may_have_one_runs_without(folder: Path, access: ModelAccess) -> None:
    played = play(folder, access, {"use": "sandboxed_tasks:either"})
    assert played.score is not None
    assert played.score.reward == 0.25  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("use", "sandbox", "complaint"),
    [
        ("sandboxed_tasks:plain", {}, "does not use a sandbox"),
        ("sandboxed_tasks:WithoutSandbox", {}, "does not use a sandbox"),
        ("chain_sum", {}, "does not use a sandbox"),
        ("sandboxed_tasks:agent", None, "needs a sandbox"),
        ("sandboxed_tasks:Place", None, "needs a sandbox"),
        ("sandboxed_tasks:Shell", None, "needs a sandbox"),
        ("sandboxed_tasks:agent", {"readable": ["missing"]}, "missing does not exist"),
    ],
)
def test_an_unusable_sandbox_is_refused(folder: Path, use: str, sandbox: dict[str, Any] | None, complaint: str) -> None:
    with pytest.raises(TaskError, match=complaint) as caught:
        load_task(TaskSpec.model_validate({"use": use, "sandbox": sandbox}), folder)
    assert caught.value.location.startswith("task.sandbox")
    assert caught.value.hint


def test_a_machine_without_bubblewrap_is_refused_with_a_hint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    spec = TaskSpec(use="sandboxed_tasks:agent", sandbox=SandboxSpec())
    with pytest.raises(TaskError, match="bwrap is not installed") as caught:
        load_task(spec, folder)
    assert "apt install bubblewrap" in (caught.value.hint or "")
    load_task(spec.model_copy(update={"sandbox": SandboxSpec(kind="none")}), folder)


COMMAND = """
import json, os, subprocess, sys
assert os.getcwd() == "/sandbox/cwd" and os.environ["ASYNCRL_SCRATCH"] == "/sandbox"
row = json.load(open(os.environ["ASYNCRL_PROMPT_FILE"]))
assert row == json.loads(os.environ["ASYNCRL_PROMPT"]) and row["answer"] == "42", row
assert "HOME" in os.environ and "SPEC_SECRET" not in os.environ
import urllib.request
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", b'{"messages": []}')
print(urllib.request.urlopen(request).read())
assert not os.path.exists("/etc/shadow")
print("a complaint", file=sys.stderr)
try:
    open(os.environ["ASYNCRL_FOLDER"] + "/agent.py", "a")
except OSError:
    print(json.dumps({"reward": 0.5, "metrics": {"words": 3}}))
"""


def test_a_command_runs_inside(folder: Path, access: ModelAccess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_SECRET", "1")
    (folder / "agent.py").write_text(COMMAND)
    options = {"command": 'python "$ASYNCRL_FOLDER/agent.py"'}
    played = play(folder, access, {"use": "command", "options": options, "sandbox": {}})
    assert not isinstance(played.score, RewardFailure), played
    assert played.score is not None
    assert (played.score.reward, dict(played.score.metrics)) == (0.5, {"words": 3})


def test_a_command_that_reaches_a_limit_says_so(folder: Path, access: ModelAccess) -> None:
    options = {"command": "yes > file; sleep 600"}
    played = play(folder, access, {"use": "command", "options": options, "sandbox": {"disk_mb": 8}})
    assert isinstance(played.score, RewardFailure)
    assert "the sandbox's limit on disk" in str(played.score)


def test_an_episode_that_takes_too_long_leaves_nothing(folder: Path, access: ModelAccess) -> None:
    spec = {"use": "command", "options": {"command": "sleep 600"}, "sandbox": {"time_s": 0.1}}
    played = play(folder, access, spec, timeout_s=1.0)
    assert isinstance(played.score, RewardFailure)
    assert "had not ended after 1 s" in str(played.score)
    assert not played.stuck
    # Zombies that this process adopted do not count.
    left = [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
    assert [one for one in left if one.name() in ("sleep", "bwrap")] == []


OWNER = """
import asyncio, sys
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.tasks.base import ModelAccess
from asyncrl_cli.workers.actors import EpisodeActor

async def main(folder):
    options = {"command": "setsid sleep 141421 & sleep 141421"}
    spec = TaskSpec.model_validate({"use": "command", "options": options, "sandbox": {}})
    actor = EpisodeActor("worker", spec, folder, folder)
    access = ModelAccess("http://127.0.0.1:9/v1", "key", "policy", "1-0")
    await asyncio.gather(*(actor.play(str(n), Prompt(str(n), "hello", {}), access, False) for n in range(3)))

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("killed", ["the owner of the worker", "the worker"])
def test_nothing_is_left_of_sandboxes_when_a_process_above_is_killed(folder: Path, killed: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)])
    started: list[psutil.Process] = []
    try:
        programs: dict[psutil.Process, list[str]] = {}
        while sum(program[:1] == ["sleep"] for program in programs.values()) < 6:
            assert owner.poll() is None
            programs = living(owner.pid)
            time.sleep(0.02)
        started = list(programs)
        worker = next(one for one, program in programs.items() if "asyncrl_cli.workers.child" in program)
        (owner if killed == "the owner of the worker" else worker).kill()
        of_sandboxes = [one for one in started if one.pid != worker.pid]
        _, left = psutil.wait_procs(of_sandboxes, timeout=60)
        assert left == []
    finally:
        owner.kill()
        owner.wait()


def living(pid: int) -> dict[psutil.Process, list[str]]:
    found = {}
    for one in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found[one] = one.cmdline()
    return found
