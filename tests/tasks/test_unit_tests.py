"""The task ``unit_tests``: which part of a response is the code, and the results of its tests."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.sandbox.bubblewrap import SandboxError
from asyncrl_cli.tasks.ready import unit_tests
from asyncrl_cli.tasks.ready.matching import MissingField
from asyncrl_cli.tasks.ready.unit_tests import UnitTests, UnusableTests, code_in

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```\nor\n```py\nx = 2\n```", "x = 2\n"),
        ("  ```python\nx = 1\n  ```", "x = 1\n"),
        ("```python\nx = 1", "x = 1\n"),
        ("```python\nx = 1\n```\nOutput:\n```\n1 2\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nRun:\n```bash\nls\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nor\n```python\nx = (\n```", "x = 1\n"),
        ("    return 1\n", "    return 1\n"),
        ("def f():\n    return 1\n```\nThis returns 1.", "def f():\n    return 1\n"),
        ("Answer\n```\nx = 1\n```", "x = 1\n"),
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


ADD = {"entry_point": "add"}
CHECK = "METADATA = {'author': 'x'}\ndef check(candidate):\n    assert candidate(1, 2) == 3\n"
FORMS: dict[str, tuple[str, dict[str, str]]] = {
    "HumanEval": (CHECK, ADD),
    "a test called test": ("def test():\n    assert add(1, 2) == 3", {}),
    "asynchronous": ("import asyncio\nasync def test_a():\n    await asyncio.sleep(0)\n    assert add(1, 2) == 3", {}),
    "a generator": ("def test_a():\n    assert add(1, 2) == 3\n    yield", {}),
    "a class of pytest": (
        "class TestAdd:\n    def setup_method(self): self.x = 1\n    def test_a(self): assert add(self.x, 2) == 3",
        {},
    ),
    "a class of unittest": (
        "import unittest\nclass Adds(unittest.TestCase):\n    def setUp(self): self.x = 1\n"
        "    def test_a(self): self.assertEqual(add(self.x, 2), 3)\nif __name__ == '__main__': unittest.main()",
        {},
    ),
    "behind a guard": ("def run():\n    assert add(1, 2) == 3\nif __name__ == '__main__': run()", {}),
    "all names of the solution": ("from solution import *\nassert add(1, 2) == 3", {}),
    "a guarded import": ("try: import no_such_module\nexcept ImportError: pass\nassert add(1, 2) == 3", {}),
    "a module of its own": (
        "import sys, types\nsys.modules['mine'] = types.ModuleType('mine')\nimport mine\nassert add(1, 2) == 3",
        {},
    ),
    "modules that are not imported": ("assert math.isclose(add(1, 2), 3) and np.allclose(add(1, 2), 3)", {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_usual_forms_of_tests(form: str) -> None:
    tests, fields = FORMS[form]
    prompt = Prompt("row", "?", {"tests": tests} | fields)
    task = UnitTests()
    task.check_prompt(prompt)
    right, wrong = (task.reward(prompt, f"def add(a, b): return a {sign} b", True) for sign in "+-")
    assert (right.reward, wrong.reward) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        (CHECK, "nothing calls check"),
        ("def run():\n    assert add(1, 2) == 3", "execute nothing"),
        ("import math\n'Tests of add.'", "execute nothing"),
        ("def test_a(tmp_path): assert add(1, 2) == 3", "takes arguments"),
        ("@pytest.mark.parametrize('x', [1])\ndef test_a(x): assert add(x, 2) == 3", "takes arguments"),
        ("try: assert add(1, 2) == 3\nexcept Exception: pass", "pass without any code"),
        ("class TestAdd:\n    def test_a(self): pass", "pass without any code"),
        ("from main import add\nassert add(1, 2) == 3", "import main, which is not installed"),
        ("def test_a():\n    from . import add\n    assert add(1, 2) == 3", "import ., which"),
        (
            "from unittest.mock import patch\nwith patch('builtins.input', return_value='1'): assert add() == 1",
            "patch builtins.input, but",
        ),
        (
            "import builtins\nfrom unittest import mock\n@mock.patch.object(builtins, 'input')\n"
            "def test_a(replaced): assert add() == 1",
            "patch builtins, but",
        ),
    ],
)
def test_tests_that_cannot_tell_right_code_are_refused(tests: str, why: str) -> None:
    with pytest.raises(UnusableTests, match=why):
        UnitTests().check_prompt(Prompt("row", "?", {"tests": tests}))


def test_errors_in_a_row_are_not_blamed_on_the_response() -> None:
    task = UnitTests()
    with pytest.raises(MissingField):
        task.reward(Prompt("row", "?"), "x = 1", True)
    with pytest.raises(SyntaxError):
        task.reward(Prompt("row", "?", {"tests": "assert ("}), "x = 1", True)
    assert task.reward(Prompt("row", "?", {"tests": "assert True"}), "I do not know", True).reward == 0.0


def test_a_sandbox_that_fails_gives_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> list[bool]:
        raise SandboxError("no memory")

    task = UnitTests()
    monkeypatch.setattr(unit_tests, "run", broken)
    with pytest.raises(SandboxError):
        task.reward(Prompt("row", "?", {"tests": "assert True"}), "x = 1", True)


def test_blocks_are_found_in_linear_time() -> None:
    """A search that restarts at each line takes hours."""
    assert code_in("```python\n" * 200_000).startswith("```python")
