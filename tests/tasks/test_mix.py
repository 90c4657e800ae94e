"""Mixes: every task has its share in any stretch of rows, and a prompt's uid names its task."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.data.loader import PromptLoader
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import SplitSpec, TaskMember, TaskSpec
from asyncrl_cli.tasks.base import ModelAccess, Split, TaskMix, is_episodic, task_of
from asyncrl_cli.tasks.mix import MixTask, OneCall, interleave, reward_limit_s
from asyncrl_cli.tasks.prompts import LazyPrompts, load_prompts

WEIGHTS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6)


@given(WEIGHTS, st.integers(1, 400), st.data())
def test_in_every_window_every_task_has_its_share(weights: list[float], rows: int, data: st.DataObject) -> None:
    tasks, _ = interleave(weights, rows)
    start = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(start + 1, rows))
    for task, weight in enumerate(weights):
        share = weight / sum(weights)
        there = int((tasks[start:end] == task).sum())
        # Each end of the window has an error of half a row, plus the half rows of the other tasks.
        assert abs(there - share * (end - start)) <= 1 + share * len(weights) + 1e-6


@given(WEIGHTS, st.integers(1, 200), st.integers(1, 200))
def test_a_row_is_the_same_in_a_mix_of_any_size_and_every_row_is_used(
    weights: list[float], few: int, many: int
) -> None:
    few, many = sorted((few, many))
    short, long = interleave(weights, few), interleave(weights, many)
    assert [part.tolist() for part in short] == [part[:few].tolist() for part in long]
    for task in range(len(weights)):
        places = long[1][long[0] == task].tolist()
        assert places == list(range(len(places)))


class Letters:
    """A task with its name in prompts and rewards."""

    def __init__(self, letter: str) -> None:
        self.letter = letter

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        return LazyPrompts(size, lambda index: Prompt(f"{split}/{index}", f"{self.letter}{index}"))

    def reward(self, prompt: Prompt, response: str, finished: bool) -> Any:
        return self.letter, prompt.uid, response


class Silent:
    """A task with a reward only."""

    def reward(self, prompt: Prompt, response: str, finished: bool) -> float:
        return 0.0


class Agent(Letters):
    async def run(self, prompt: Prompt, model: ModelAccess) -> float:
        return float(prompt.uid)


def mix_of(folder: Path = Path(), **members: tuple[Any, float]) -> MixTask:
    spec = TaskSpec(mix=[TaskMember(name=name, use="m:f", weight=weight) for name, (_, weight) in members.items()])
    return MixTask({name: task for name, (task, _) in members.items()}, spec, folder)


@given(st.integers(0, 2**32), st.integers(1, 100))
def test_a_shuffle_keeps_the_shares(seed: int, rows: int) -> None:
    mix = mix_of(a=(Letters("a"), 3), b=(Letters("b"), 1))
    prompts = mix.prompts("train", rows)
    loader = PromptLoader(prompts, seed, shuffle=True)
    for _ in range(2):
        epoch = [loader.next().uid for _ in range(rows)]
        assert sorted(epoch) == sorted(prompt.uid for prompt in prompts)
        assert [uid[0] for uid in epoch] == [prompt.uid[0] for prompt in prompts]


@given(st.integers(0, 200))
def test_rewards_and_episodes_find_the_task_of_a_prompt(index: int) -> None:
    tasks = {"a": Letters("a"), "b": Letters("b")}
    mix = mix_of(a=(tasks["a"], 2), b=(tasks["b"], 1))
    prompt = mix.prompts("train", 201)[index]
    name = prompt.uid[0]
    task, its_prompt = task_of(mix, prompt)
    assert task is tasks[name]
    assert its_prompt == tasks[name].prompts("train", 201)[int(its_prompt.uid.removeprefix("train/"))]
    assert mix.reward(prompt, "reply", True) == (name, its_prompt.uid, "reply")
    assert isinstance(mix, TaskMix)
    assert task_of(tasks["a"], prompt) == (tasks["a"], prompt)


def test_rows_of_members_are_repeated_in_training_and_never_in_an_evaluation(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": str(index), "uid": f"row{index}"}) for index in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    own = SplitSpec(path=str(tmp_path / "rows.jsonl"))
    spec = TaskSpec(
        mix=[TaskMember(name="file", use="m:f", train=own, eval=own), TaskMember(name="made", use="m:f", weight=3)]
    )
    mix = MixTask({"file": Silent(), "made": Letters("m")}, spec)
    trained = [prompt.uid for prompt in mix.prompts("train", 40)]
    assert Counter(uid for uid in trained if uid.startswith("file/")) == {
        "file/row0": 3,
        "file/row1": 3,
        "file/row2": 2,
        "file/row3": 2,
    }
    held_out = [prompt.uid for prompt in load_prompts("eval", SplitSpec(size=256), mix)]
    assert len(held_out) == len(set(held_out)) == 17, "four rows of the file are a quarter, and the fifth would repeat"


def test_in_a_mix_with_an_agent_every_rollout_is_an_episode() -> None:
    plain, mixed = mix_of(a=(Letters("a"), 1)), mix_of(a=(Letters("a"), 1), agent=(Agent("x"), 1))
    assert not is_episodic(plain) and is_episodic(mixed)
    task, prompt = mixed.member(Prompt("agent/7", ""))
    assert asyncio.run(task.run(prompt, ModelAccess("", "", ""))) == 7.0
    one_call, prompt = mixed.member(Prompt("a/train/1", "a1"))
    assert isinstance(one_call, OneCall)
    assert one_call.reward(prompt, "reply", True) == ("a", "train/1", "reply")
    assert mixed.scored_by(Prompt("a/train/1", "a1"))[0] is one_call.task
    assert mixed.prompts("train", 1)[0].uid == "a/train/0"


def test_time_limits_of_members() -> None:
    spec = TaskSpec(
        mix=[TaskMember(name="a", use="m:f", reward_timeout_s=3.0), TaskMember(name="b", use="m:f")],
        reward_timeout_s=7.0,
    )
    assert [reward_limit_s(spec, Prompt(f"{name}/1", "")) for name in "ab"] == [3.0, 7.0]
    assert reward_limit_s(TaskSpec(use="m:f", reward_timeout_s=7.0), Prompt("a/1", "")) == 7.0
