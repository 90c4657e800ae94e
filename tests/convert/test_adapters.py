"""Reward functions of other trainers: named in `task.use`, or called by a function in a comment of the spec."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.tasks.load import load_task
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


VERL_REWARD = """
def compute(data_source, solution_str, ground_truth, extra_info=None):
    right = float(solution_str == ground_truth and data_source == "gsm8k" and extra_info == {"split": "train"})
    return {"score": right, "pred": solution_str}
"""
TRL_REWARD = "def compute(completions, answer, **_): return [float(c == a) for c, a in zip(completions, answer)]"


def test_verls_and_trls_reward_functions_are_named_and_work_unchanged(tmp_path: Path) -> None:
    path = "reward.custom_reward_function."
    verl = test_verl.converted([f"{path}path=recipes/verl_reward.py", f"{path}name=compute"])
    trl = test_trl.converted("grpo", *test_trl.BASE, "--reward_funcs", "trl_reward.compute")
    row = {
        "data_source": "gsm8k",
        "reward_model": {"ground_truth": "7"},
        "extra_info": {"split": "train"},
        "answer": "7",
    }
    prompt = Prompt("uid", "3+4", row)
    for conversion, module_name, text in ((verl, "verl_reward", VERL_REWARD), (trl, "trl_reward", TRL_REWARD)):
        (tmp_path / f"{module_name}.py").write_text(text)
        use = next(setting.value for setting in conversion.settings if setting.key == "task.use")
        assert use == f"{module_name}:compute"
        task = load_task(TaskSpec(use=use), tmp_path)
        if module_name == "trl_reward":
            assert task.rewards(prompt, ["7", "8"], [True, True]) == [1.0, 0.0]
        else:
            assert [task.reward(prompt, response, True)["score"] for response in "78"] == [1.0, 0.0]


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
