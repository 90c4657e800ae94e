"""The prompts of a split come from its file, otherwise from the task."""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import SplitSpec, TaskSpec
from asyncrl_cli.tasks.function_task import FunctionTask
from asyncrl_cli.tasks.load import load_task
from asyncrl_cli.tasks.prompts import LazyPrompts, load_prompts
from asyncrl_cli.tasks.ready.matching import ExactMatch
from asyncrl_cli.tasks.ready.math_answers import MathAnswers
from tests.spell_backward import SpellBackward

REWARD_ONLY = FunctionTask(lambda prompt, response: 1.0, "rewards:f")


def test_a_file_is_preferred_to_the_task_and_relative_to_the_spec(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "uid": "1"}\n{"prompt": "b", "uid": "2"}\n')
    for task in (REWARD_ONLY, SpellBackward()):
        assert [p.uid for p in load_prompts("train", SplitSpec(path="rows.jsonl"), task, tmp_path)] == ["1", "2"]
    assert len(load_prompts("train", SplitSpec(path=str(tmp_path / "rows.jsonl"), size=1), REWARD_ONLY)) == 1


def test_the_task_makes_its_own_prompts() -> None:
    prompts = load_prompts("eval", SplitSpec(size=5), SpellBackward())
    assert [prompt.uid for prompt in prompts] == [f"spell_backward/eval/{row}" for row in range(5)]


def test_a_split_without_a_source_or_a_size_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.eval has no path"):
        load_prompts("eval", SplitSpec(size=5), REWARD_ONLY)
    with pytest.raises(DataError, match=r"data\.train\.size"):
        load_prompts("train", SplitSpec(), SpellBackward())


def test_answers_that_cannot_be_read_are_named_when_the_data_is_opened(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": r"\$36"}, {"prompt": "b", "answer": r"\frac{1}{"}, {"prompt": "c"}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        with pytest.raises(DataError) as caught:
            load_prompts("train", SplitSpec(path=name), MathAnswers(), tmp_path)
        assert f"{name}:2: the task cannot score prompt" in str(caught.value)
        assert "a brace is not closed" in str(caught.value)
    with pytest.raises(DataError, match=r"rows.jsonl:3: the task cannot score prompt.*no field 'answer'"):
        load_prompts("train", SplitSpec(path="rows.jsonl"), ExactMatch(), tmp_path)
    assert len(load_prompts("train", SplitSpec(path="rows.jsonl", size=1), MathAnswers(), tmp_path)) == 1
    member = {"name": "m", "use": "math", "train": {"path": str(tmp_path / "rows.jsonl")}}
    mix = load_task(TaskSpec.model_validate({"mix": [member, {**member, "name": "n"}]}), tmp_path)
    with pytest.raises(DataError, match=r"rows\.jsonl:2"):
        load_prompts("train", SplitSpec(size=4), mix, tmp_path)


def test_rows_of_a_table_and_of_a_task_are_checked_when_it_is_opened(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "a"}], [{"role": "user", "content": None}]]
    parquet.write_table(pa.table({"prompt": messages}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet:2: prompt .*: message 1 has no content"):
        load_prompts("train", SplitSpec(path="rows.parquet"), REWARD_ONLY, tmp_path)

    class Made(SpellBackward):
        def prompts(self, split: str, size: int) -> Sequence[Prompt]:
            return LazyPrompts(size, lambda row: Prompt(f"p{row}", "a" if row < 2 else ({"role": "user"},)))

    with pytest.raises(DataError, match=r"data.train:3: prompt .p2.: message 1 has no content"):
        load_prompts("train", SplitSpec(size=5), Made())
