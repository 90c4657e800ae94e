"""The task ``unit_tests``: which part of a response is the code, and what its tests say."""

from __future__ import annotations

import time
from typing import Any

import pytest

from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.tasks import unit_tests
from asyncrl_cli.tasks.matching import MissingField
from asyncrl_cli.tasks.sandbox import SandboxError
from asyncrl_cli.tasks.unit_tests import UnitTests, code_in


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```\nor\n```py\nx = 2\n```", "x = 2\n"),
        ("  ```python\nx = 1\n  ```", "x = 1\n"),
        ("```python\nx = 1", "```python\nx = 1"),
    ],
)
def test_the_last_fenced_block_is_the_code(response: str, code: str) -> None:
    assert code_in(response) == code


FUNCTIONS = "def test_one(): assert f(1) == 2\ndef test_two(): assert f(2) == 3\ndef helper(): assert False"


@pytest.mark.parametrize(
    ("tests", "partial", "reward", "share"),
    [
        (FUNCTIONS, False, 1.0, 1.0),
        (["assert f(1) == 2", "assert f(2) == 4"], False, 0.0, 0.5),
        (["assert f(1) == 2", "assert f(2) == 4"], True, 0.5, 0.5),
        ("assert f(1) == 2\nassert f(2) == 4", True, 0.0, 0.0),
    ],
)
def test_rewards(tests: Any, partial: bool, reward: float, share: float) -> None:
    response = "```python\ndef f(x):\n    return x + 1\n```"
    scored = UnitTests(partial=partial).reward(Prompt("row", "?", {"tests": tests}), response, True)
    assert (scored.reward, scored.metrics) == (reward, {"tests_passed": share})


def test_mistakes_in_a_row_are_no_fault_of_the_response() -> None:
    task = UnitTests()
    with pytest.raises(MissingField):
        task.reward(Prompt("row", "?"), "x = 1", True)
    with pytest.raises(SyntaxError):
        task.reward(Prompt("row", "?", {"tests": "assert ("}), "x = 1", True)
    assert task.reward(Prompt("row", "?", {"tests": "assert True"}), "I do not know", True).reward == 0.0


def test_a_sandbox_that_fails_is_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[bool]:
        raise SandboxError("no memory")

    task = UnitTests()
    monkeypatch.setattr(unit_tests, "run", broken)
    with pytest.raises(SandboxError):
        task.reward(Prompt("row", "?", {"tests": "assert True"}), "x = 1", True)


def test_blocks_are_found_in_time_that_grows_with_the_response() -> None:
    started = time.process_time()
    assert code_in("```python\n" * 200_000).startswith("```python")
    assert time.process_time() - started < 10.0, "a search that starts anew at each line takes hours"
