"""`asyncrl evaluate` until a process would start: targets, refusals, options and output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from asyncrl_cli.cli.app import app
from asyncrl_cli.cli.evaluate import _name, _read_target, _result_table
from asyncrl_cli.core.errors import UserError
from asyncrl_cli.orchestrator.evaluation import Evaluation, HeldOut, series_of
from asyncrl_cli.orchestrator.experiment import Experiment
from asyncrl_cli.orchestrator.offline import offline, store
from asyncrl_cli.orchestrator.serving import Served
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.sections import ExperimentSpec
from tests.cli.conftest import NoChecks

pytestmark = pytest.mark.slow

SPEC = """
model: {path: org/model}
task: {use: math}
data: {train: {path: rows.jsonl, prompt_column: question, size: 7}}
stop: {steps: 10}
"""
SETS = """
evaluation: {samples: 3, sets: {a: {data: {path: a.jsonl}}, b: {data: {path: b.jsonl}, greedy: false, samples: 2}}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "spec.yaml").write_text(SPEC)
    for name in ("rows", "a", "b", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "1+1?", "prompt": "1+1?", "answer": "2"}\n')
    for name in ("mine", "empty"):
        (tmp_path / "models" / name).mkdir(parents=True)
    (tmp_path / "models/mine/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(*arguments: str) -> UserError:
    """The error of `asyncrl evaluate ARGUMENTS`."""
    error = CliRunner().invoke(app, ["evaluate", *arguments]).exception
    assert isinstance(error, UserError), error
    assert error.exit_code == 2, "nothing was started"
    return error


def read(target: str, **options: Any) -> Any:
    return _read_target(target, **{"spec_file": None, "data": None, "changes": [], "runs_dir": Path("runs")} | options)


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["spec.yaml"], "no prompts to evaluate on", "--data PATH"),
        (["spec.yaml", "--set", "data.eval=null"], "no prompts to evaluate on", "--data PATH"),
        (["models/mine"], "no task and no data", "asyncrl evaluate models/mine --spec SPEC"),
        (["models/empty"], "no run is called 'models/empty'", "asyncrl runs"),
        (["latest"], "there is no run yet", "asyncrl train SPEC"),
        (["spec.yaml", "--data", "none.jsonl"], "none.jsonl", ""),
    ],
)
def test_what_cannot_be_evaluated_is_refused_with_a_remedy(
    folder: Path, arguments: list[str], message: str, hint: str
) -> None:
    error = refusal(*arguments)
    assert message in str(error)
    assert hint in error.hint
    assert not (folder / "runs").exists(), "a refused evaluation leaves no folder"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["spec.yaml", "--step", "3"], "only a run has steps"),
        (["spec.yaml", "--greedy", "--samples", "2"], "one greedy response"),
        (["spec.yaml", "--spec", "spec.yaml"], "is a spec already"),
    ],
)
def test_options_that_contradict_each_other_are_errors_of_usage(
    folder: Path, arguments: list[str], message: str
) -> None:
    ended = CliRunner().invoke(app, ["evaluate", *arguments])
    assert ended.exit_code == 2
    assert message in " ".join(ended.output.split())


def test_results_of_a_spec_are_in_the_given_folder_of_runs(folder: Path) -> None:
    with (
        patch("asyncrl_cli.cli.evaluate.start_checks"),
        patch("asyncrl_cli.cli.evaluate.initial_model"),
        patch.object(RunDirectory, "create", side_effect=UserError("not started")) as create,
    ):
        assert "not started" in str(refusal("spec.yaml", "--data", "test.jsonl", "--runs-dir", "elsewhere"))
    assert create.call_args.args[0] == Path("elsewhere/evaluate")


@pytest.mark.parametrize("off", ["", "evaluation: {temperature: 0.5}\n"])
def test_option_data_replaces_the_held_out_prompts_and_keeps_the_columns(folder: Path, off: str) -> None:
    (folder / "spec.yaml").write_text(SPEC + off)
    spec = read("spec.yaml", data="test.jsonl")[0].spec
    assert spec.data.eval is not None
    assert (spec.data.eval.path, spec.data.eval.prompt_column) == (str(folder / "test.jsonl"), "question")
    assert spec.data.eval.size is None, "the size is the training file's"
    changed = read("spec.yaml", data="test.jsonl", changes=["data.eval.prompt_column=prompt", "data.eval.size=1"])
    assert (changed[0].spec.data.eval.prompt_column, changed[0].spec.data.eval.size) == ("prompt", 1)
    held_out = read("spec.yaml", data="test.jsonl", changes=["data.eval.path=a.jsonl"])[0].spec.data.eval
    assert held_out.path == str(folder / "a.jsonl"), "the last word is --set's"


def test_a_folder_in_a_run_has_the_runs_spec_and_another_needs_one(folder: Path) -> None:
    run = RunDirectory.create(folder / "runs", "mine")
    run.write_json("manifest.json", {"spec_file": str(folder / "elsewhere/spec.yaml")})
    run.write_text("spec.yaml", SPEC.replace("rows.jsonl", str(folder / "rows.jsonl")) + "name: recorded\n")
    (run.path / "model").mkdir()
    (run.path / "model/config.json").write_text("{}")
    loaded, base, found = read(str(run.path / "model"))
    assert (loaded.spec.name, base, found) == ("recorded", folder / "elsewhere", None)
    assert loaded.spec.model.path == str(run.path / "model")
    loaded, base, found = read("models/mine", spec_file=Path("spec.yaml"))
    assert (loaded.spec.name, base, found) == ("run", folder, None)
    assert loaded.spec.model.path == str(folder / "models/mine"), "the folder counts from here, not from the spec"
    loaded, _, found = read("mine")
    assert (loaded.spec.model.path, found.path) == ("org/model", Path("runs") / run.run_id)
    assert read("Qwen/Qwen3-0.6B", spec_file=Path("spec.yaml"))[0].spec.model.path == "Qwen/Qwen3-0.6B"


def test_every_evaluation_has_an_offline_name_and_all_prompts(folder: Path) -> None:
    (folder / "spec.yaml").write_text(SPEC + SETS)
    spec = load_spec(folder / "spec.yaml", ["data.eval.path=test.jsonl", "evaluation.prompts=1"]).spec

    def kinds(kind: str | None, data: str = "", spec: ExperimentSpec = spec) -> list[str]:
        prompts = HeldOut([], scoring=None)  # type: ignore[arg-type]
        chosen = list(offline(series_of(spec, prompts, dict.fromkeys(("a", "b"), prompts)), kind, data))
        assert all(one.max_prompts is None for one in chosen)
        return [one.kind for one in chosen]

    sets = ["offline-a:greedy", "offline-b:sampled"]
    assert kinds(None) == ["offline:greedy", "offline:sampled", *sets]
    assert kinds(None, "x") == ["offline-x:greedy", "offline-x:sampled", *sets]
    assert kinds("greedy") == ["offline:greedy", "offline-a:greedy"]
    assert kinds("sampled") == ["offline:sampled", "offline-b:sampled"]
    single = load_spec(folder / "spec.yaml", ["evaluation.samples=1"]).spec
    assert kinds(None, spec=single) == ["offline:greedy", *sets]
    assert kinds("sampled", spec=single) == ["offline:sampled", "offline-b:sampled"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"offline:greedy": 1, "offline:sampled": 3, "offline-a:greedy": 1, "offline-b:sampled": 2}),
        (["--samples", "4"], {"offline:sampled": 4, "offline-a:sampled": 4, "offline-b:sampled": 4}),
        (["--sampled"], {"offline:sampled": 3, "offline-a:sampled": 1, "offline-b:sampled": 2}),
        (["--greedy"], {"offline:greedy": 1, "offline-a:greedy": 1, "offline-b:greedy": 1}),
        (["--data", "a.jsonl", "--samples", "2"], {"offline-a:sampled": 2}),
    ],
)
def test_the_options_hold_for_all_evaluations(folder: Path, options: list[str], expected: dict[str, int]) -> None:
    """A stand-in without responses replaces the engines, so there is nothing to print."""
    (folder / "spec.yaml").write_text(SPEC + SETS)
    found: dict[str, int] = {}

    def run(experiment: Experiment, served: Served, choose: Any, **_: Any) -> Any:
        prompts = HeldOut([], scoring=None)  # type: ignore[arg-type]
        held_out = prompts if experiment.spec.data.eval is not None else None
        chosen = choose(series_of(experiment.spec, held_out, dict.fromkeys(experiment.spec.evaluation.sets, prompts)))
        found.update({one.kind: one.samples for one in chosen})
        assert served.spec.evaluation == experiment.spec.evaluation
        return [], ""

    with (
        patch("asyncrl_cli.cli.evaluate.start_checks", NoChecks),
        patch("asyncrl_cli.cli.evaluate.initial_model", lambda *_: folder / "models/mine"),
        patch("asyncrl_cli.cli.evaluate._run", run),
    ):
        ended = CliRunner().invoke(
            app, ["evaluate", "spec.yaml", "--set", "data.eval.path=test.jsonl", *options], catch_exceptions=False
        )
    assert ended.exit_code == 0, ended.output
    assert found == expected


def test_no_evaluation_replaces_another(folder: Path) -> None:
    run = RunDirectory.create(folder / "runs", "mine")
    file = "evaluations/step-000002-offline-greedy.jsonl"
    one = Evaluation(result=None, warning="", file=file, text="first\n")
    paths = [store(run, replace(one, text=f"{number}\n")) for number in range(3)]
    assert [path.name.removeprefix("step-000002-") for path in paths] == [
        "offline-greedy.jsonl",
        "offline-greedy-2.jsonl",
        "offline-greedy-3.jsonl",
    ]
    assert [path.read_text() for path in paths] == ["0\n", "1\n", "2\n"]


@given(st.text(min_size=1))
def test_names_of_data_are_safe_in_kinds_and_files(data: str) -> None:
    assert all(char.isalnum() or char == "_" for char in _name(data))
    assert len(_name(data)) <= 32


@pytest.mark.parametrize(
    ("data", "name"), [("data/test-2.jsonl", "test_2"), ("hf:openai/gsm8k", "gsm8k"), ("my_rows:held_out", "held_out")]
)
def test_an_evaluation_is_named_after_its_data(data: str, name: str) -> None:
    assert _name(data) == name


def test_the_table_has_each_measure_with_its_interval() -> None:
    head = {
        "kind": "offline-x:sampled",
        "accuracy": 0.25,
        "mean_reward": 0.3,
        "mean_length": 9.5,
        "prompts": 1200,
        "samples": 2,
        "pass_at": [0.25, 0.3],
        "metrics": {"accuracy": 2.0},
        "intervals": {"accuracy": [0.2, 0.3], "mean_reward": [-0.1, 0.7], "pass_at_2": [0.3, 0.5]},
    }
    unscored = {"kind": "offline:greedy", "accuracy": None, "mean_reward": None, "mean_length": 3.0, "prompts": 0}
    lines = [line.split(maxsplit=4) for line in _result_table([head, unscored])[1:]]
    assert lines == [
        ["offline-x:sampled", "1,200", "accuracy", "0.250", "0.200 to 0.300"],
        ["offline-x:sampled", "1,200", "tokens_mean", "9.500"],
        ["offline-x:sampled", "1,200", "reward_mean", "0.300", "-0.100 to 0.700"],
        ["offline-x:sampled", "1,200", "pass_at_1", "0.250"],
        ["offline-x:sampled", "1,200", "pass_at_2", "0.300", "0.300 to 0.500"],
        ["offline-x:sampled", "1,200", "task/accuracy", "2.000"],
        ["offline:greedy", "0", "tokens_mean", "3.000"],
    ]
