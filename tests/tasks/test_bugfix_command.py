"""Bugfix with a command as the agent: it works on the repository in the sandbox, and the hidden tests decide."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from bugfix import BugfixByCommand

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.sandbox.commands import open_sandbox
from asyncrl_cli.spec.inputs import SandboxSpec, TaskSpec
from asyncrl_cli.tasks.base import SPEC_FOLDER, ModelAccess, RewardResult
from asyncrl_cli.tasks.episode_sandbox import episode_sandbox
from asyncrl_cli.tasks.load import load_task
from asyncrl_cli.tasks.ready.command import CommandFailed
from tests.sandbox.kinds import NEEDS_BUBBLEWRAP

pytestmark = [pytest.mark.slow, NEEDS_BUBBLEWRAP]

ACCESS = ModelAccess("http://127.0.0.1:9/v1", "key", "policy", "rollout")
FILES = {"calc.py": "def add(a, b):\n    return a - b\n", "README.md": "Sums.\n"}
ADD = Prompt(
    "row",
    "Fix calc.py.",
    {"files": FILES, "tests": {"calc.add": "assert calc.add(2, 3) == 5\n"}, "broken": ["calc.add"]},
)


def played(command: str, **options: Any) -> RewardResult:
    """One episode of the command in a sandbox."""

    async def play() -> RewardResult:
        task = BugfixByCommand(command, **options)
        async with open_sandbox(SandboxSpec(network="none")) as sandbox:
            return await task.run(ADD, ACCESS, sandbox)

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("command", "reward", "changed"),
    [
        ("sed -i 's/-/+/' calc.py", 1.0, 1.0),
        ("sed -i 's/-/*/' calc.py", 0.0, 1.0),
        ("true", 0.0, 0.0),
        ("rm calc.py", 0.0, 1.0),
        ("printf '\\377' > calc.py", 0.0, 1.0),
        ("sed -i 's/-/+/' calc.py; echo 0", 1.0, 1.0),
    ],
)
def test_the_hidden_tests_decide_and_not_what_the_command_prints(command: str, reward: float, changed: float) -> None:
    assert played(command) == RewardResult(reward, {"changed": changed})


def test_the_command_gets_the_first_message_and_no_tests() -> None:
    seen = 'grep -rq "== 5" "$ASYNCRL_SCRATCH" && exit 3; env | grep "== 5" && exit 4; '
    asked = 'grep -q "Fix calc.py." "$ASYNCRL_PROMPT_FILE" || exit 5; test "$(ls)" = "$WANTED" || exit 6; '
    result = played(seen + asked + "sed -i 's/-/+/' calc.py", env={"WANTED": "README.md\ncalc.py"})
    assert result.reward == 1.0


def test_rows_next_to_the_spec_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows contain the hidden tests."""
    monkeypatch.setenv(SPEC_FOLDER, str(tmp_path))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("the tests")

    async def play() -> RewardResult:
        task = BugfixByCommand(f"test ! -e {rows} && sed -i 's/-/+/' calc.py")
        async with episode_sandbox(task, SandboxSpec(network="none"), ACCESS.base_url, ADD) as sandbox:
            assert sandbox is not None
            return await task.run(ADD, ACCESS, sandbox)

    assert asyncio.run(play()).reward == 1.0


def test_a_command_that_fails_fails_the_episode() -> None:
    with pytest.raises(CommandFailed, match="status 7: no model"):
        played("echo no model >&2; exit 7")


def test_options_of_bugfix_apply_and_a_sandbox_is_required(tmp_path: Path) -> None:
    options = {"command": "true", "functions": 1, "terse": True, "max_lines": 1}
    spec = TaskSpec(use="bugfix:BugfixByCommand", options=options, sandbox=SandboxSpec())
    task = load_task(spec, tmp_path)
    prompts = task.prompts("train", 3)
    assert [task.check_prompt(prompt) for prompt in prompts] == [None] * 3
    with pytest.raises(TaskError, match="needs a sandbox"):
        load_task(spec.model_copy(update={"sandbox": None}), tmp_path)
    with pytest.raises(TaskError, match="unexpected keyword argument 'function'"):
        load_task(spec.model_copy(update={"options": options | {"function": 1}}), tmp_path)
    with pytest.raises(TaskError, match="missing a required argument: 'command'") as missing:
        load_task(spec.model_copy(update={"options": {"functions": 1}}), tmp_path)
    assert "did you mean" not in missing.value.hint
