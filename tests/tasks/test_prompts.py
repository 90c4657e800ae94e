"""A split comes from its file, else from the task."""

from pathlib import Path

import pytest

from asyncrl_cli.data.errors import DataError
from asyncrl_cli.spec.sections import SplitSpec
from asyncrl_cli.tasks.function_task import FunctionTask
from asyncrl_cli.tasks.prompts import load_prompts
from asyncrl_cli.tasks.spell_backward import SpellBackward

REWARD_ONLY = FunctionTask(lambda prompt, response: 1.0, "rewards:f")


def test_a_file_is_taken_before_the_task_and_sought_beside_the_spec(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "uid": "1"}\n{"prompt": "b", "uid": "2"}\n')
    for task in (REWARD_ONLY, SpellBackward()):
        assert [p.uid for p in load_prompts("train", SplitSpec(path="rows.jsonl"), task, tmp_path)] == ["1", "2"]
    assert len(load_prompts("train", SplitSpec(path=str(tmp_path / "rows.jsonl"), size=1), REWARD_ONLY)) == 1


def test_the_task_makes_its_own() -> None:
    prompts = load_prompts("eval", SplitSpec(size=5), SpellBackward())
    assert [prompt.uid for prompt in prompts] == [f"spell_backward/eval/{row}" for row in range(5)]


def test_neither_file_nor_task_nor_size() -> None:
    with pytest.raises(DataError, match=r"data\.eval has no path"):
        load_prompts("eval", SplitSpec(size=5), REWARD_ONLY)
    with pytest.raises(DataError, match=r"data\.train\.size"):
        load_prompts("train", SplitSpec(), SpellBackward())
