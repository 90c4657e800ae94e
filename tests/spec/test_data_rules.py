"""Rules for splits, curricula and evaluation sets, and the base folder of their paths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl_cli.spec.changes import check_changes
from asyncrl_cli.spec.load import dump_spec, load_spec
from asyncrl_cli.spec.problems import SpecError

Write = Callable[..., Path]
HEAD = "model: {path: a/b}\ntask: {use: chain_sum}\nstop: {steps: 10}\n"
SET = "evaluation.sets.b.task"


def a_set_with(task: str) -> str:
    return f"evaluation: {{sets: {{b: {{data: {{size: 1}}, task: {task}}}}}}}"


@pytest.mark.parametrize(
    ("lines", "path", "words"),
    [
        ("data: {train: {path: rows.txt}}", "data.train.path", "does not exist"),
        ("data: {train: {path: spec.yaml}}", "data.train.path", "unknown kind of file: spec.yaml"),
        ("data: {train: {path: some}}", "data.train.path", "some is a folder; name its files"),
        ("data: {train: {path: none.parquet}}", "data.train.path", "none.parquet does not exist"),
        ("data: {train: {path: 'none*.jsonl'}}", "data.train.path", "no file matches"),
        ("data: {train: {path: [rows.csv, none.csv]}}", "data.train.path", "none.csv does not exist"),
        ("data: {train: {path: [rows.csv, 'hf:a/b']}}", "data.train.path", "task.mix joins any sources"),
        ("data: {train: {path: [rows.csv, some]}}", "data.train.path", "some is a folder"),
        ("data: {train: {path: [rows.csv, '*.csv']}}", "data.train.path", "rows.csv is named twice"),
        ("data: {train: {path: []}}", "data.train.path", "at least 1 item"),
        ("data: {train: {path: rows.csv, image_column: a}}", "model.max_images", "data.train.image_column names"),
        ("data: {train: {path: [3]}}", "data.train.path.0", "must be text, not 3"),
        ("data: {train: {path: {a: b}}}", "data.train.path", "must be text, not a mapping"),
        ("data: {train: {path: rows.parquet.gz}}", "data.train.path", "does not exist"),
        ("data: {train: {path: 'hf:a/b'}}", "data.train.split", "needs a split"),
        ("data: {train: {path: rows.csv, config: x}}", "data.train.config", "only hub data sets"),
        ("data: {train: {path: rows.csv, split: train}}", "data.train.split", "only hub data sets"),
        ("data: {train: {size: 3, split: train}}", "data.train.split", "only hub data sets"),
        ("data: {train: {size: 3, template: 'Q: {question}'}}", "data.train.template", "this split has no path"),
        ("data: {train: {size: 3, system: Be brief.}}", "data.train.system", "give a path"),
        ("data: {train: {size: 3}, eval: {size: 3, prompt_column: q}}", "data.eval.prompt_column", "no path"),
        ("evaluation: {sets: {a: {data: {size: 1, uid_column: id}}}}", "evaluation.sets.a.data.uid_column", "no path"),
        ("data: {train: {path: rows.csv, template: 'Q: {}'}}", "data.train.template", "{} names no column"),
        ("data: {train: {path: rows.csv, template: 'Q: {a'}}", "data.train.template", "invalid template"),
        ("data: {train: {path: rows.csv, template: 'Q'}}", "data.train.template", "names no column"),
        ("evaluation: {sets: {a: {every: 2}}}", "evaluation.sets.a.data", "add `data`"),
        ("evaluation: {sets: {a: {data: {}}}}", "evaluation.sets.a.data", "missing"),
        ("evaluation: {sets: {a: {data: {size: 1}, samples: 4}}}", "evaluation.sets.a.samples", "set greedy to false"),
        ("evaluation: {sets: {a: {data: {size: 1, split: dev}}}}", "evaluation.sets.a.data.split", "no split `dev`"),
        ("evaluation: {sets: {a b: {data: {size: 1}}}}", "evaluation.sets", "'a b'"),
    ],
)
def test_a_mistake_in_data_settings_is_reported(write: Write, lines: str, path: str, words: str) -> None:
    spec = write(f"{HEAD}{lines}\n")
    write("prompt\n", "rows.csv")
    (spec.parent / "some").mkdir()
    with pytest.raises(SpecError) as error:
        load_spec(spec)
    (problem,) = error.value.problems
    assert problem.path.startswith(path)
    assert words in f"{problem.message} {problem.hint}"


@pytest.mark.parametrize(
    ("task", "path", "words"),
    [
        ("{use: harbor}", "task.sandbox", "works in containers"),
        ("{use: command, sandbox: {kind: container}}", "task.sandbox.image", "missing"),
        ("{use: command, sandbox: {kind: container, image: 'a{}'}}", "task.sandbox.image", "names no column"),
        ("{use: command, sandbox: {image: a}}", "task.sandbox.image", "kind: container"),
        ("{use: command, sandbox: {kind: none, runtime: runsc}}", "task.sandbox.runtime", "has no runtime"),
        ("{use: exact, tools: {mcp: {a: {}}}}", "task.tools.mcp.a", "one of `command` and `url`"),
        ("{use: exact, tools: {mcp: {a: {command: b, url: 'http://c'}}}}", "task.tools.mcp.a", "one of `command`"),
        ("{use: exact, tools: {mcp: {a: {url: 'http://c', args: [d]}}}}", "task.tools.mcp.a.args", "not a setting"),
        ("{use: exact, tools: {mcp: {a: {command: b, headers: {c: d}}}}}", "task.tools.mcp.a.headers", "not a setting"),
        ("{use: exact, tools: {mcp: {}}}", "task.tools.mcp", "at least 1"),
        ("{mix: [{name: a, use: exact}], tools: {mcp: {a: {command: b}}}}", "task.tools", "members of the mix"),
        ("{mix: [{name: a, use: exact, tools: {mcp: {b: {}}}}]}", "task.mix.0.tools.mcp.b", "one of `command`"),
        (
            "{mix: [{name: a, use: exact}]}\nevaluation: {sets: {b: {data: {path: 'my.rows:make'}}}}",
            "evaluation.sets.b.data.path",
            "a mix of tasks; give the set one task, as evaluation.sets.b.task.use",
        ),
        *(
            (f"{{mix: [{{name: {name}, use: exact}}]}}", "task.mix.0.name", f"`{name}` is reserved")
            for name in ("mean", "std", "correct", "masked_rollouts", "uniform_groups", "outside")
        ),
        (
            "{use: exact}\nevaluation: {sets: {offline: {data: {size: 2}}}}",
            "evaluation.sets.offline",
            "`offline` is reserved",
        ),
        (f"{{use: exact}}\n{a_set_with('{use: mahts}')}", f"{SET}.use", "did you mean `math`?"),
        (f"{{use: exact}}\n{a_set_with('{}')}", SET, f"give {SET}.use (one task) or {SET}.mix (several)"),
        (f"{{use: exact}}\n{a_set_with('{use: exact, mix: [{name: a, use: math}]}')}", f"{SET}.use", "to null"),
        (
            f"{{use: exact}}\n{a_set_with('{mix: [{name: a, use: exact}, {name: a, use: math}]}')}",
            f"{SET}.mix.1.name",
            "the name of another task",
        ),
        (
            f"{{use: exact}}\n{a_set_with('{mix: [{name: a, use: exact, eval: {path: none.csv}}]}')}",
            f"{SET}.mix.0.eval.path",
            "does not exist",
        ),
        (f"{{use: exact}}\n{a_set_with('{use: exact, options: {a: .nan}}')}", f"{SET}.options.a", "a finite number"),
    ],
)
def test_a_mistake_in_a_task(write: Write, task: str, path: str, words: str) -> None:
    spec = write(HEAD.replace("{use: chain_sum}", task))
    with pytest.raises(SpecError) as raised:
        load_spec(spec)
    (problem,) = raised.value.problems
    assert problem.path == path
    assert words in f"{problem.message}; {problem.hint}"


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
    assert warned("train", "'train[:200]'") == ["data.eval.path"]
    assert warned("'train[200:]'", "'train[:200]'") == []


def test_a_member_of_a_mix_that_is_evaluated_on_its_training_rows_is_reported(write: Write) -> None:
    write("", "rows.jsonl")
    member = "{name: a, use: exact, train: {path: rows.jsonl}, eval: {path: rows.jsonl}}"
    loaded = load_spec(write(HEAD.replace("{use: chain_sum}", f"{{mix: [{member}]}}")))
    assert [(problem.path, problem.message) for problem in loaded.warnings] == [
        ("task.mix.0.eval.path", "the held-out prompts are also trained on")
    ]


def test_a_column_beside_a_template_is_reported(write: Write) -> None:
    write("prompt\n", "rows.csv")
    loaded = load_spec(write(f"{HEAD}data: {{train: {{path: rows.csv, template: '{{a}}', prompt_column: b}}}}\n"))
    assert "data.train.prompt_column" in [problem.path for problem in loaded.warnings]


def test_a_loaded_spec_names_the_files_of_a_pattern(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWS", "rows")
    for name in ("rows-2.jsonl", "rows-1.jsonl.gz", "more[1].csv"):
        write("", name)
    spec = write(
        f"{HEAD}data:\n  train: {{path: ['${{env:ROWS}}-*', 'more[1].csv']}}\n  eval: {{path: '${{env:ROWS}}-2*'}}\n"
        "evaluation: {sets: {one: {data: {path: 'rows-1*'}}}}\n"
    )
    loaded = load_spec(spec)
    files = [str(spec.parent / name) for name in ("rows-1.jsonl.gz", "rows-2.jsonl", "more[1].csv")]
    assert loaded.spec.data.train.path == loaded.spec.data.train.paths == files
    assert [(problem.path, problem.message) for problem in loaded.warnings] == [
        ("data.eval.path", "the held-out prompts are also trained on")
    ]
    again = write(dump_spec(loaded.spec, loaded.references), "again.yaml")
    assert "${env:ROWS}-2*" in again.read_text()
    write("", "rows-1-new.jsonl")
    write("", "rows-3.jsonl")
    recorded = load_spec(again).spec
    assert recorded.data.train.path == files, "new files change nothing"
    assert recorded.data.eval.paths == files[1:2]
    assert check_changes(loaded.spec, recorded) == []
    with pytest.raises(SpecError, match=r"data\.train\.path: cannot change for a recorded run"):
        check_changes(recorded, load_spec(spec).spec)


@pytest.mark.parametrize(
    ("lines", "path", "words"),
    [
        ("", "data.eval", "set data.eval to null"),
        ("model: {path: a/b, max_images: 1}", "model.max_images", "no images yet"),
        ("data: {eval: null}", "rollout.group_size", "each for one rollout"),
        ("data: {eval: null}\nstop: {epochs: 3}", "stop.epochs", "so there are no epochs"),
        ("data: {eval: null, filter: {}}", "data.filter", "choose when a prompt is played"),
        ("data: {eval: null}\nevaluation: {sets: {a: {data: {size: 1}}}}", "evaluation.sets.a.task", "of its own"),
        ("task: {use: external, sandbox: {}}", "task.sandbox", "run elsewhere"),
        ("task: {mix: [{name: a, use: external}]}", "task.mix.0.use", "cannot be part of a mix"),
        ("data: {train: {path: rows.csv}, eval: null}", "rollout.gateway.port", "only in the run's sessions.json"),
    ],
)
def test_a_setting_that_does_not_fit_outside_programs_is_reported(
    write: Write, lines: str, path: str, words: str
) -> None:
    sections = {"model": "{path: a/b}", "task": "{use: external}", "stop": "{steps: 10}"}
    kept = "".join(f"{key}: {value}\n" for key, value in sections.items() if f"{key}:" not in lines)
    file = write(f"{kept}{lines}\n")
    write("prompt\na\n", "rows.csv")
    try:
        problems = load_spec(file, ["rollout.group_size=8"]).warnings
    except SpecError as error:
        problems = tuple(error.problems)
    assert any(problem.path == path and words in f"{problem.message} {problem.hint}" for problem in problems), problems
