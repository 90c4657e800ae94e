"""Loading the task that ``task.use`` names, and its errors."""

import asyncio
import importlib
import inspect
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import TaskMember, TaskSpec
from asyncrl_cli.spec.rules.data import READY_TASKS
from asyncrl_cli.tasks.base import ModelAccess, is_episodic, scores_groups, task_of
from asyncrl_cli.tasks.load import load_task

names = (f"user_task_{number}" for number in itertools.count())


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``load(source, "name", **options)`` loads a name from a module with this source next to the spec."""
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))

    def write_and_load(source: str, name: str, **options: Any) -> Any:
        module = next(names)
        (tmp_path / f"{module}.py").write_text(source)
        return load_task(TaskSpec(use=f"{module}:{name}", options=options), tmp_path)

    return write_and_load


CLASS = """
class Echo:
    def __init__(self, bonus: float = 0.0):
        if bonus < 0:
            raise ValueError("bonus must not be negative")
        self.bonus = bonus
    def reward(self, prompt, response, finished):
        return self.bonus + (response == prompt.content)
"""


def test_every_ready_task_has_a_class() -> None:
    for target in READY_TASKS.values():
        module, _, name = target.partition(":")
        assert inspect.isclass(getattr(importlib.import_module(module), name))


def test_a_class_next_to_the_spec_is_loaded(load: Any) -> None:
    assert load(CLASS, "Echo", bonus=0.5).reward(Prompt("row", "a"), "a", True) == 1.5


def test_a_function_next_to_the_spec_gets_the_row(load: Any) -> None:
    source = "def f(prompt, response): return prompt['uid'], prompt['prompt'], prompt['answer'], response"
    task = load(source, "f")
    assert task.reward(Prompt("row", "2+2=", {"answer": "4"}), "5", True) == ("row", "2+2=", "4", "5")
    messages = ({"role": "user", "content": "hi"},)
    assert task.reward(Prompt("row", messages, {"answer": ""}), "", True)[1] == [{"role": "user", "content": "hi"}]


VERL = {"data_source": "gsm8k", "reward_model": {"ground_truth": "4", "style": "rule"}, "extra_info": {"index": 1}}


@pytest.mark.parametrize(
    ("source", "row", "result"),
    [
        ("def f(response, prompt): return response, prompt['uid']", {}, ("5", "row")),
        ("def f(_, text, /): return text, _['uid']", {}, ("5", "row")),
        ("def f(prompt, response, finished): return finished", {}, True),
        ("def f(prompt, response, strict=0, *, finished=None): return strict, finished", {}, (0, True)),
        ("def f(completion, answer): return completion, answer", {"answer": "4"}, ("5", "4")),
        ("def f(completion, answer='none'): return completion, answer", {}, ("5", "none")),
        (
            "def f(completion, **columns): return completion, columns",
            {"a": 1},
            ("5", {"a": 1, "uid": "row", "prompt": ""}),
        ),
        (
            "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
            "    return data_source, solution_str, ground_truth, extra_info",
            VERL,
            ("gsm8k", "5", "4", {"index": 1}),
        ),
    ],
)
def test_arguments_are_passed_by_name(load: Any, source: str, row: dict[str, Any], result: Any) -> None:
    assert load(source, "f").reward(Prompt("row", "", row), "5", True) == result


CHAT = ({"role": "user", "content": "2+2="},)


@pytest.mark.parametrize(
    ("source", "content", "result"),
    [
        ("def f(prompt, responses): return prompt['uid'], responses", "?", ("row", ["4", "5"])),
        ("def f(completions, example, answer): return completions, answer", CHAT, (["4", "5"], "4")),
        (
            "def f(responses, finished, answer, **more): return finished, answer, set(more)",
            "?",
            ([True, False], "4", {"uid", "prompt"}),
        ),
        (
            "def f(prompts, completions, answer, **more): return prompts, completions, answer, more",
            *("2+2=", (["2+2="] * 2, ["4", "5"], ["4", "4"], {"uid": ["row"] * 2})),
        ),
        (
            "def f(completions, **more): return [c[0]['content'] for c in completions], more",
            CHAT,
            (["4", "5"], {"answer": ["4"] * 2, "prompts": [list(CHAT)] * 2, "uid": ["row"] * 2}),
        ),
    ],
)
def test_a_function_of_the_group_gets_lists(load: Any, source: str, content: Any, result: Any) -> None:
    task = load(source, "f")
    assert scores_groups(task)
    assert task.rewards(Prompt("row", content, {"answer": "4"}), ["4", "5"], [True, False]) == result


def test_a_class_of_the_group_may_use_its_own_single_reward(load: Any) -> None:
    source = (
        CLASS + "    def rewards(self, prompt, responses): return [self.reward(prompt, r, True) for r in responses]\n"
    )
    task = load(source, "Echo", bonus=0.5)
    assert scores_groups(task) and not is_episodic(task)
    assert not scores_groups(
        load("class C:\n rewards = [1.0]\n def reward(self, prompt, response, finished): ...", "C")
    )


def test_in_a_mix_of_episodes_nothing_sees_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mixed_groups.py").write_text(
        "def group(prompt, responses): ...\nasync def agent(prompt, model): ...\ndef plain(prompt, response): ...\n"
    )

    def mix(*names: str) -> Any:
        return load_task(TaskSpec(mix=[TaskMember(name=name, use=f"mixed_groups:{name}") for name in names]), tmp_path)

    with pytest.raises(TaskError, match="group scores whole groups, but agent plays episodes") as error:
        mix("plain", "group", "agent")
    assert error.value.location == "task.mix.1.use"
    mixed = mix("plain", "group")
    assert [scores_groups(task_of(mixed, Prompt(f"{name}/1", ""))[0]) for name in ("plain", "group")] == [False, True]


def test_a_column_that_the_row_lacks_is_named(load: Any) -> None:
    with pytest.raises(LookupError, match="'label' is not a column of the row, which has 'answer', 'uid', 'prompt'"):
        load("def f(completion, label): return 1.0", "f").reward(Prompt("row", "", {"answer": "4"}), "5", True)


def test_an_async_function_of_prompt_and_model_is_an_agent(load: Any) -> None:
    agent = load("async def f(prompt, model): return prompt['answer'] + model.model", "f")
    assert is_episodic(agent)
    played = agent.run(Prompt("row", "", {"answer": "4"}), ModelAccess("http://here", "key", "policy"))
    assert asyncio.run(played) == "4policy"
    assert not is_episodic(load("async def f(prompt, response): return 1.0", "f"))


ENVIRONMENT = """
class Guess:
    def __init__(self, tries, prompt):
        self.left, self.answer = tries, prompt["answer"]
    def reset(self):
        return [{"role": "user", "content": "?"}]
    def step(self, reply):
        self.left -= 1
"""


def test_each_episode_has_its_own_environment(load: Any) -> None:
    task = load(ENVIRONMENT, "Guess", tries=3)
    assert is_episodic(task)
    first, second = (task.environment(Prompt("row", "", {"answer": answer})) for answer in "ab")
    first.step({})
    assert (first.left, second.left, first.answer, second.answer) == (2, 3, "a", "b")
    with pytest.raises(TaskError, match="missing a required argument: 'tries'"):
        load(ENVIRONMENT, "Guess")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("chain_sums", "did you mean `chain_sum`"),
        ("nothing_like_it", "ready tasks are chain_sum, math"),
        ("module:", "no ready task"),
    ],
)
def test_an_unknown_name(use: str, message: str) -> None:
    with pytest.raises(TaskError, match=message) as caught:
        load_task(TaskSpec(use=use), Path())
    assert caught.value.location == "task.use"
    assert caught.value.hint


def test_a_missing_module_is_reported_with_the_searched_folder(tmp_path: Path) -> None:
    with pytest.raises(TaskError) as caught:
        load_task(TaskSpec(use="no_such_module_here:f"), tmp_path)
    assert str(tmp_path) in caught.value.message
    assert "no_such_module_here.py" in caught.value.hint


@pytest.mark.parametrize(
    ("source", "name", "options", "message"),
    [
        (CLASS, "Ecko", {}, "did you mean `Echo`"),
        (CLASS, "Echo", {"bonsu": 1}, "did you mean `bonus`"),
        (CLASS, "Echo", {"bonus": -1}, "bonus must not be negative"),
        ("class C: pass", "C", {}, "no method reward"),
        ("x = 3", "x", {}, r"neither a class nor a function \(got int\)"),
        ("def f(prompt, response): return 1", "f", {"a": 1}, "takes no options"),
        ("def f(prompt): return 1", "f", {}, "no parameter that is clearly the response"),
        ("def f(text, output): return 1", "f", {}, "no parameter that is clearly the response"),
        ("async def f(model, prompt): return 1", "f", {}, "no parameter that is clearly the response"),
        ("class C:\n def rewards(self, responses, prompt): ...", "C", {}, r"called as rewards\(prompt, responses\)"),
        (
            "class C:\n def rewards(self, prompt, responses): ...\n async def run(self, prompt, model): ...",
            *("C", {}, "rewards for whole groups and run: rollouts of agents and environments are episodes"),
        ),
        (
            "class C:\n def rewards(self): ...\n def reset(self): return []\n def step(self, reply): ...",
            *("C", {}, "rewards for whole groups and reset"),
        ),
        ("class C:\n def reward(self, response, prompt, finished): ...", "C", {}, "cannot be called as reward"),
        ("class C:\n def reward(self, prompt, response): ...", "C", {}, "cannot be called as reward"),
        ("def f(prompt, model): return 1", "f", {}, "is an agent, but it is not async"),
        ("async def f(prompt, model, finished): return 1", "f", {}, r"f\(prompt, model\): missing .* 'finished'"),
        ("class C:\n def run(self, prompt, model): return 1", "C", {}, "run that is not async"),
        ("class C:\n def reset(self): return []", "C", {}, "not both reset and step"),
        ("class C:\n def reset(self): return []\n def step(self, reply): ...", "C", {"x": 1}, "constructed as C()"),
        ("import no_such_package_xyz", "f", {}, "needs 'no_such_package_xyz'"),
        ("def f(:", "f", {}, "SyntaxError"),
    ],
)
def test_errors_in_a_users_task_are_reported(load: Any, source: str, name: str, options: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message) as caught:
        load(source, name, **options)
    assert caught.value.location in ("task.use", "task.options")
    assert caught.value.hint
