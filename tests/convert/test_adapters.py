"""Reward functions of other trainers: named in `task.use`, or called by the function of docs/from-trl.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.tasks.load import load_task
from tests.convert import test_trl, test_verl

FLUENT = """
def fluent(completions, answer, **_): return [float(c == a) for c, a in zip(completions, answer)]
def think_format_reward(completions, **_): return [None] * len(completions)
"""
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


def test_the_function_of_the_page_adds_up_trls_reward_functions() -> None:
    page = (Path(__file__).parents[2] / "docs/from-trl.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def rewards(" in block)
    names: dict[str, Any] = {}
    exec(code.replace("from my_lib.rewards import fluent", FLUENT).replace("from trl.rewards import", "#"), names)
    rewards = names["rewards"](prompts=["3+4"] * 2, completions=["7", "8"], answer=["7", "7"])
    assert rewards == [2.0, 0.0]
