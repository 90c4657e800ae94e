"""The reward functions in the comments of converted specs: they are valid Python and call the original function."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.convert import test_trl, test_verl


def function_of(remarks: list[tuple[str, str]], name: str) -> Callable[..., Any]:
    """A function of the code in the remark about `task.use`."""
    (code,) = (text.partition("\n")[2] for key, text in remarks if key == "task.use")
    namespace: dict[str, Any] = {}
    exec(re.sub(r"^    ", "", code, flags=re.MULTILINE), namespace)
    found: Callable[..., Any] = namespace[name]
    return found


def module(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    made = ModuleType(name)
    vars(made).update(functions)
    monkeypatch.setitem(sys.modules, name, made)


@pytest.mark.parametrize("result", [0.5, {"score": 0.5, "accuracy": 1}])
def test_verls_reward_function_is_called_with_the_row(monkeypatch: pytest.MonkeyPatch, result: Any) -> None:
    calls: list[tuple[Any, ...]] = []

    def compute(*arguments: Any) -> Any:
        calls.append(arguments)
        return result

    module(monkeypatch, "my_reward", compute=compute)
    path = "reward.custom_reward_function."
    conversion = test_verl.converted([f"{path}path=recipes/my_reward.py", f"{path}name=compute"])
    row = {
        "prompt": [],
        "data_source": "gsm8k",
        "reward_model": {"ground_truth": "7"},
        "extra_info": {"split": "train"},
    }
    assert function_of(conversion.remarks, "reward")(row, "the answer is 7") == 0.5
    assert calls == [("gsm8k", "the answer is 7", "7", {"split": "train"})]


def test_trls_reward_functions_are_called_with_lists_and_weighted(monkeypatch: pytest.MonkeyPatch) -> None:
    def right(prompts: list[Any], completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [
            float(completion[0]["content"] == wanted) for completion, wanted in zip(completions, answer, strict=True)
        ]

    module(monkeypatch, "mine", right=right)
    module(monkeypatch, "my_rewards", brief=lambda prompts, completions, **columns: [None, None])
    words = ["--reward_funcs", "mine.right", "brief", "--reward_weights", "2.0", "1.0"]
    rewards = function_of(test_trl.converted("grpo", *test_trl.BASE, *words).remarks, "rewards")
    prompts = [[{"role": "user", "content": "3+4"}]] * 2
    completions = [[{"role": "assistant", "content": text}] for text in ("7", "8")]
    assert rewards(prompts=prompts, completions=completions, answer=["7", "7"]) == [2.0, 0.0]


def test_a_comment_keeps_the_code_as_it_is(home: Path) -> None:
    from asyncrl_cli.convert.write import spec_text

    conversion = test_verl.converted(["data.train_batch_size=256"])
    text = spec_text(conversion, "test", Path())
    code = next(remark for key, remark in conversion.remarks if key == "task.use").partition("\n")[2]
    assert [line.removeprefix("  # ").rstrip() for line in text.splitlines() if line.startswith("  #     ")] == [
        line for line in code.splitlines() if line
    ]
