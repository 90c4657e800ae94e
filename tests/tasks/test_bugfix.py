"""Bugfix: the generated repositories, and that only correct code is rewarded."""

import asyncio
import json
import random
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from bugfix import Bugfix
from hypothesis import given
from hypothesis import strategies as st
from repository import MODULE, Repository, Shape, callable_of, edits, library, make_repository, passes

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.sandbox.commands import BlockingSandbox, open_sandbox
from asyncrl_cli.spec.inputs import SandboxSpec
from asyncrl_cli.tasks.base import RewardResult
from tests.sandbox.kinds import NEEDS_BUBBLEWRAP

pytestmark = pytest.mark.slow

TINY: dict[str, Any] = {"functions": 1, "max_lines": 1, "terse": True, "instruction": "Fix calc.py."}
shapes = st.builds(
    Shape,
    functions=st.integers(1, 4),
    bugs=st.integers(1, 3),
    max_lines=st.none() | st.integers(1, 4),
    terse=st.booleans(),
).filter(lambda shape: shape.bugs <= shape.functions)
seeds = st.integers(0, 2**32)


ADD = Prompt(
    "row",
    "Fix calc.py.",
    {
        "files": {"calc.py": "def add(a, b):\n    return a - b\n\n\ndef sub(a, b):\n    return a - b\n"},
        "tests": {
            "calc.add": "assert calc.add(2, 3) == 5\nassert calc.add(0, 1) == 1\n",
            "calc.sub": "assert calc.sub(2, 3) == -1\n",
        },
        "broken": ["calc.add"],
    },
)


def repaired(made: Repository) -> dict[str, str]:
    text = made.files[MODULE]
    for fix in made.fixes.values():
        text = fix.applied(text)
    return {**made.files, MODULE: text}


def fails(files: Mapping[str, str], made: Repository) -> set[str]:
    """The functions with tests that fail here, without a sandbox."""
    failed = set()
    for name, tests in made.tests.items():
        found = callable_of(files[MODULE], name.removeprefix("calc."))
        try:
            exec(tests.replace(f"{name}(", "found("), {"found": found})
        except Exception:
            failed.add(name)
    return failed


@given(shapes, seeds)
def test_the_hidden_tests_fail_for_the_bugs_and_pass_without_them(shape: Shape, seed: int) -> None:
    made = make_repository(random.Random(seed), shape)
    assert len(made.tests) == shape.functions
    assert len(made.fixes) == shape.bugs
    assert fails(made.files, made) == made.fixes.keys()
    assert not fails(repaired(made), made)


@given(shapes, seeds)
def test_the_same_random_numbers_make_the_same_repository(shape: Shape, seed: int) -> None:
    assert make_repository(random.Random(seed), shape) == make_repository(random.Random(seed), shape)


def test_every_function_has_a_bug_that_shows() -> None:
    for function in library():
        shape = Shape(functions=len(library()), bugs=len(library()))
        made = make_repository(random.Random(function.name), shape)
        assert f"calc.{function.name}" in made.fixes


def test_sed_makes_the_edits(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    for function in library():
        source = function.written(random.Random(function.name), terse=False)
        for edit in edits(source):
            scripts = subprocess.run(
                ["sed", edit.sed(source)], input=source, capture_output=True, text=True, check=True, cwd=tmp_path
            )
            assert scripts.stdout == edit.applied(source), (edit, edit.sed(source))
    assert not file.exists()


# -- the task


def test_the_splits_and_the_demonstrations_share_no_repository() -> None:
    task = Bugfix(**TINY)
    train = {prompt.fields["files"]["calc.py"] for prompt in task.prompts("train", 1500)}
    held_out = {prompt.fields["files"]["calc.py"] for prompt in task.prompts("eval", 300)}
    rng = random.Random(0)
    conversations = [task.demonstration(rng, True) for _ in range(500)]
    shown = {f"{messages[2]['content']}\n" for messages in conversations if len(messages) > 2}
    assert not train & held_out
    assert not shown & held_out
    assert len(train) > 900


def share_right(task: Bugfix, clean: bool) -> float:
    """The share of demonstrations that fix the function after reading the code. Only these may announce the change."""
    rng = random.Random(0)
    replies = []
    for _ in range(1500):
        messages = task.demonstration(rng, clean)
        if len(messages) != 4:  # not the reply that may fix the function
            continue
        if "tool_calls" not in messages[3]:
            assert not clean and messages[3]["content"] == "Done."
            replies.append(False)
            continue
        source, command = f"{messages[2]['content']}\n", messages[3]["tool_calls"][0]["function"]["arguments"]
        function = next(one for one in library(1) if source.startswith(f"def {one.name}("))
        edit = next(one for one in edits(source) if f"'{one.sed(source)}'" in json.loads(command)["command"])
        solution, calls = callable_of(function.source, function.name), function.calls(rng, 12)
        expected = [solution(*call) for call in calls]
        replies.append(passes(edit.applied(source), function.name, calls, expected))
        assert messages[3]["content"] is None or (replies[-1] and messages[3]["content"] == f"Needs {edit.text}. ")
    assert len(replies) > 700
    return sum(replies) / len(replies)


def test_clean_demonstrations_are_right_and_most_of_the_mixture_is_not() -> None:
    assert share_right(Bugfix(**TINY), clean=True) == 1.0
    assert 0.1 < share_right(Bugfix(**TINY), clean=False) < 0.28


@pytest.mark.parametrize("options", [{"bugs": 0}, {"bugs": 5}, {"kinds": ["typo"]}, {"kinds": []}, {"functions": 99}])
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options)) + "|functions are requested"):
        Bugfix(**options)


@pytest.mark.parametrize(
    "change",
    [
        {"files": {}},
        {"files": {"src/calc.py": ""}},
        {"files": {"README.md": ""}},
        {"files": ["calc.py"]},
        {"tests": {"calc.add": 1}},
        {"tests": {"calc.add": "assert ("}},
        {"broken": []},
        {"broken": ["calc.mul"]},
    ],
)
def test_rows_without_a_repository_are_refused(change: dict[str, Any]) -> None:
    task = Bugfix(**TINY)
    task.check_prompt(ADD)
    with pytest.raises((ValueError, SyntaxError)):
        task.check_prompt(Prompt("row", "Fix it.", {**ADD.fields, **change}))


# -- the reward

RIGHT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"
WRONG = ADD.fields["files"]["calc.py"]


def test_right_code_is_rewarded_and_the_bug_is_not() -> None:
    task = Bugfix(**TINY)
    assert task.judge_files(ADD, {"calc.py": RIGHT}).reward == 1.0
    assert task.judge_files(ADD, {"calc.py": WRONG}).reward == 0.0
    assert task.judge_files(ADD, {"calc.py": f"# still wrong\n{WRONG}"}).reward == 0.0
    assert task.judge_files(ADD, None).reward == 0.0
    assert task.judge_files(ADD, {"calc.py": RIGHT.replace("sub(a, b)", "sub(b, a)")}).reward == 0.0


def test_modules_that_import_each_other_are_judged_together() -> None:
    files = {"calc.py": "import stock\n\n\ndef add(a, b):\n    return stock.plus(a, b)\n", "stock.py": "plus = max\n"}
    fields = {"files": files, "tests": {"calc.add": "assert calc.add(2, 3) == 5\n"}, "broken": ["calc.add"]}
    task = Bugfix(**TINY)
    prompt = Prompt("row", "Fix it.", fields)
    assert task.judge_files(prompt, {**files, "stock.py": "def plus(a, b):\n    return a + b\n"}).reward == 1.0
    assert task.judge_files(prompt, {**files, "stock.py": "plus = min\n"}).reward == 0.0


# -- the episode, in a real sandbox


def episode(commands: list[str], prompt: Prompt = ADD) -> tuple[list[str], RewardResult]:
    """The output of the commands, and the reward of a first answer after them."""

    async def played() -> tuple[list[str], RewardResult]:
        task = Bugfix(**TINY)
        shown, metrics = [], Counter[str]()
        async with open_sandbox(SandboxSpec(network="none")) as sandbox:
            blocking = BlockingSandbox(sandbox, asyncio.get_running_loop())
            environment = await asyncio.to_thread(task.environment, prompt, blocking)
            for command in commands:
                function = {"name": "shell", "arguments": json.dumps({"command": command})}
                call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}
                step = await asyncio.to_thread(environment.step, call)
                shown.append(str(step.messages[0]["content"]))
                metrics.update(step.metrics)
            step = await asyncio.to_thread(environment.step, {"role": "assistant", "content": "Done."})
            assert step.done
        return shown, RewardResult(step.reward, {**metrics, **step.metrics})

    return asyncio.run(played())


@NEEDS_BUBBLEWRAP
def test_an_episode_that_fixes_the_code_is_rewarded() -> None:
    shown, result = episode(["cat calc.py", "sed -i '2s/-/+/' calc.py", "ls; ls nothing"])
    assert shown[0] == WRONG.rstrip("\n")
    assert shown[1] == ""
    assert shown[2].startswith("calc.py\n")
    assert shown[2].endswith("\n(exit status 2)")
    assert result.reward == 1.0
    assert result.metrics == {"changed": 1.0, "tool_calls": 3.0, "tool_errors": 0.0}


@NEEDS_BUBBLEWRAP
def test_the_shell_finds_no_test_and_no_answer() -> None:
    """Not in files, not in the environment, and not in the memory of a visible process."""
    shown, result = episode(
        [
            "grep -rls 'calc[.]add(2' /sandbox /etc $(find /tmp -maxdepth 1 -type f) | head",
            "(env; cat /proc/*/environ /proc/*/cmdline) | tr '\\0' '\\n' | grep 'calc[.]add'",
        ]
    )
    assert shown[0] == ""
    assert "calc.add" not in shown[1]
    assert result.reward == 0.0


@NEEDS_BUBBLEWRAP
@pytest.mark.parametrize(
    "command",
    [
        "echo 'print(1)' > test_examples.py; echo 'def test(): pass' > test_calc.py",
        "rm calc.py",
        "rm calc.py; ln -s /etc/passwd calc.py",
        "rm calc.py; mkdir calc.py",
        "rm calc.py; mkfifo calc.py",
        "head -c 300000 /dev/zero | tr '\\0' '#' > calc.py",
        "printf '\\377\\376' > calc.py",
        "printf 'import os\\nos._exit(0)\\n' > sitecustomize.py; printf 'import sitecustomize\\n' >> calc.py",
    ],
)
def test_tampering_in_the_sandbox_is_not_rewarded(command: str) -> None:
    _, result = episode([command])
    assert result.reward == 0.0
