"""Training from Python: a notebook, a run that is stopped, and functions and specs that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from threading import Lock

import pytest

from asyncrl_cli.core.errors import ConfigError, RunError
from asyncrl_cli.python import Run, train
from asyncrl_cli.spec.problems import SpecError
from asyncrl_cli.tasks.function_task import FunctionTask

from .conftest import LIMIT_S, steps_of, until

REPOSITORY = Path(__file__).parents[2]
SHORT_RUN = """
from asyncrl_cli.python import train

BONUS = 0.25

def short(response):
    return BONUS / (1 + len(response))

print(train("spec.yaml", reward=short, overrides={"stop.steps": 1000}).folder)
"""
SPEC = """
model: {path: REPOSITORY/specs/models/chain-sum-0.3M, max_length: 64}
task: {use: "spec.yaml names no function: lost"}
data: {train: {path: rows.jsonl}}
rollout: {group_size: 2, max_prompt_tokens: 8, max_response_tokens: 8}
pipeline: {groups_per_step: 2}
stop: {steps: 5}
tracking: {mlflow: false}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+2="}\n' * 8)
    (tmp_path / "spec.yaml").write_text(SPEC.replace("REPOSITORY", str(REPOSITORY)))
    return tmp_path


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.rotating
def test_notebook_of_the_documentation_trains(tmp_path: Path) -> None:
    notebook = json.loads((REPOSITORY / "docs/notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (tmp_path / "docs").mkdir()
    (tmp_path / "specs").symlink_to(REPOSITORY / "specs")
    program = tmp_path / "docs/program.py"
    program.write_text("\n".join([*cells, "print(set(run.samples().table), run.metrics()['reward/mean'].iloc[-1])"]))
    done = subprocess.run(
        [sys.executable, program.name], cwd=program.parent, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, model, last_line = done.stdout.splitlines()
    assert model.endswith("/model finished") and "step 20 of 20" in done.stdout
    tables, _, reward = last_line.rpartition(" ")
    assert tables == "{'training'}" and float(reward) > 0.3


@pytest.mark.stack
@pytest.mark.slow
def test_run_outlives_its_python_process_and_another_one_stops_it(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHORT_RUN], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    run = Run(done.stdout.strip())
    try:
        until(lambda: (run.folder / "metrics.jsonl").exists() and steps_of(run.folder), "a step")
        with pytest.raises(TimeoutError, match="still runs after 0 s"):
            run.wait(timeout_s=0)
        with pytest.raises(RunError, match="no final model yet"):
            _ = run.model
    finally:
        run.stop()
    assert run.status == "interrupted" and run.metrics()["reward/mean"].between(0, 0.25).all()
    with pytest.raises(RunError, match="the run interrupted"):
        run.wait()


def test_function_with_a_value_that_cannot_travel_is_refused_by_name(folder: Path) -> None:
    guard = Lock()

    def guarded(response: str) -> float:
        with guard:
            return len(response)

    with pytest.raises(ConfigError, match="guarded uses guard, a lock, which cannot be sent to the run") as refusal:
        train("spec.yaml", reward=guarded)
    assert refusal.value.hint == "make guard inside the function"
    assert not list(folder.glob("asyncrl_*"))


def test_mistakes_of_spec_and_function_are_refused_before_a_run_exists(folder: Path) -> None:
    with pytest.raises(SpecError, match="groups_per_stp"):
        train({"pipeline": {"groups_per_stp": 2}}, reward=FunctionTask)
    with pytest.raises(ConfigError, match="no parameter that is clearly the response"):
        train("spec.yaml", reward=lambda words: 0.0)
    with pytest.raises(RunError, match="not a run's folder"):
        Run(folder)
    assert not (folder / "runs").exists()
