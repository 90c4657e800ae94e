"""What must be consistent in splits, curricula and evaluation sets, and the base folder of their paths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl_cli.spec.load import dump_spec, load_spec
from asyncrl_cli.spec.problems import SpecError

Write = Callable[..., Path]
HEAD = "model: {path: a/b}\ntask: {use: chain_sum}\nstop: {steps: 10}\n"


@pytest.mark.parametrize(
    ("lines", "path", "words"),
    [
        ("data: {train: {path: rows.txt}}", "data.train.path", "does not exist"),
        ("data: {train: {path: spec.yaml}}", "data.train.path", "unknown kind of file: spec.yaml"),
        ("data: {train: {path: some}}", "data.train.path", "is not a folder that `datasets` saved"),
        ("data: {train: {path: none.parquet}}", "data.train.path", "none.parquet does not exist"),
        ("data: {train: {path: 'hf:a/b'}}", "data.train.split", "needs a split"),
        ("data: {train: {path: rows.csv, config: x}}", "data.train.config", "only hub data sets"),
        ("data: {train: {path: rows.csv, split: train}}", "data.train.split", "only hub and saved data sets"),
        ("data: {train: {size: 3, split: train}}", "data.train.split", "only hub and saved data sets"),
        ("data: {train: {path: rows.csv, template: 'Q: {}'}}", "data.train.template", "{} names no column"),
        ("data: {train: {path: rows.csv, template: 'Q: {a'}}", "data.train.template", "invalid template"),
        ("data: {train: {path: rows.csv, template: 'Q'}}", "data.train.template", "names no column"),
        (
            "data: {curriculum: {field: a, stages: [{max: 1}, {until_prompt: 5}]}}",
            "data.curriculum.stages.0.until_prompt",
            "the later stages are never reached",
        ),
        (
            "data: {curriculum: {field: a, stages: [{until_prompt: 5}, {until_prompt: 5}]}}",
            "data.curriculum.stages.1.until_prompt",
            "use more than 5",
        ),
        (
            "data: {curriculum: {field: a, stages: [{min: 3, max: 2}]}}",
            "data.curriculum.stages.0.min",
            "3 is more than the stage's max 2",
        ),
        (
            "data: {curriculum: {field: a, stages: [{til: 3}]}}",
            "data.curriculum.stages.0.til",
            "until_prompt",
        ),
        ("data: {curriculum: {field: a, stages: []}}", "data.curriculum.stages", "at least 1 item"),
        ("data: {curriculum: {stages: [{}]}}", "data.curriculum.field", "add `field`: the column"),
        ("evaluation: {sets: {a: {every: 2}}}", "evaluation.sets.a.data", "add `data`"),
        ("evaluation: {sets: {a: {data: {}}}}", "evaluation.sets.a.data", "missing"),
        ("evaluation: {sets: {a: {data: {size: 1}, samples: 4}}}", "evaluation.sets.a.samples", "set greedy to false"),
        ("evaluation: {sets: {a: {data: {size: 1, split: dev}}}}", "evaluation.sets.a.data.split", "no split `dev`"),
        ("evaluation: {sets: {a b: {data: {size: 1}}}}", "evaluation.sets", "'a b'"),
    ],
)
def test_one_mistake(write: Write, lines: str, path: str, words: str) -> None:
    spec = write(f"{HEAD}{lines}\n")
    write("prompt\n", "rows.csv")
    (spec.parent / "some").mkdir()
    with pytest.raises(SpecError) as error:
        load_spec(spec)
    (problem,) = error.value.problems
    assert problem.path.startswith(path)
    assert words in f"{problem.message} {problem.hint}"


def test_only_files_are_relative_to_the_spec(write: Write) -> None:
    path = write(
        f"{HEAD}data:\n  train: {{path: rows.csv, template: '{{a}}'}}\n  eval: {{path: 'my.rows:make', size: 3}}\n"
        "evaluation:\n  sets:\n    hub: {data: {path: 'hf:a/b@main', split: test}}\n"
        "    file: {data: {path: more.jsonl}, greedy: false, samples: 4}\n    own: {data: {size: 2, split: train}}\n"
    )
    write("prompt\n", "rows.csv")
    write("{}\n", "more.jsonl")
    loaded = load_spec(path)
    data, sets = loaded.spec.data, loaded.spec.evaluation.sets
    assert loaded.warnings == ()
    assert (data.train.path, data.eval.path) == (str(path.parent / "rows.csv"), "my.rows:make")
    assert sets["hub"].data.path == "hf:a/b@main"
    assert sets["file"].data.path == str(path.parent / "more.jsonl")
    again = write(dump_spec(loaded.spec, loaded.references), "again.yaml")
    assert load_spec(again).spec == loaded.spec


def test_one_source_may_be_trained_and_evaluated_on_by_split(write: Write) -> None:
    def warned(train: str, held_out: str) -> list[str]:
        splits = [
            f"{name}: {{path: 'hf:a/b', split: {split}}}" for name, split in (("train", train), ("eval", held_out))
        ]
        return [problem.path for problem in load_spec(write(f"{HEAD}data: {{{', '.join(splits)}}}\n")).warnings]

    assert warned("train", "test") == []
    alone = load_spec(write(f"{HEAD}data: {{train: {{path: 'hf:a/b', split: train}}}}\n"))
    assert (alone.spec.data.eval, alone.warnings) == (None, ()), "without held-out prompts nothing is evaluated"
    assert warned("train", "train") == ["data.eval.path"]
