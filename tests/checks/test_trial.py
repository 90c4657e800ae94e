"""Rewards and environments are tried on the first rows before anything starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from asyncrl_cli.checks.finding import Finding, findings_of
from asyncrl_cli.checks.start import StartChecks
from asyncrl_cli.checks.trial import Trial
from asyncrl_cli.core.errors import ConfigError, TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.tasks.load import load_task
from tests.doc_examples import code_blocks

pytestmark = pytest.mark.slow

SOURCE = """
from asyncrl_cli.tasks.base import Step
from asyncrl_cli.tasks.tools import ToolTask
def fine(prompt, response):
    print("a reward prints")
    return float(response == prompt["answer"])
def parts(prompt, response):
    return {"score": float(response == prompt["answer"]), "format": 0.5}
def nothing(prompt, response):
    return None
def group(prompt, responses):
    return [float(response == prompt["answer"]) for response in responses]
def short(prompt, responses):
    return [1.0]
def text(prompt, response):
    return "1"
def other_column(prompt, response):
    return float(response == prompt["solution"])
def empty(prompt, response):
    return float(response.split()[-1] == "4")
def hangs(prompt, response):
    while True: pass
def ends(prompt, response):
    import os; os._exit(3)
async def agent(prompt, model): ...
class Guess:
    def __init__(self, prompt): self.number = prompt["answer"]
    def reset(self): return [{"role": "user", "content": "?"}]
    def step(self, reply): return Step(reward=1, done=True)
class Broken(Guess):
    def reset(self): return prompt
def weather(*cities): return ""
class Tools(ToolTask):
    def tools(self, prompt): return [weather]
    def judge(self, prompt, text): return 1.0
class Judge(ToolTask):
    def tools(self, prompt): return []
    def judge(self, prompt, text): return '1'
"""
ROWS = [Prompt("a", "2+2=", {"answer": "4"}), Prompt("b", "1+1=", {"answer": "2"})]
HELD_OUT = [Prompt("c", "0+1=", {"answer": 1, "level": 1})]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "tried_task", raising=False)
    (tmp_path / "tried_task.py").write_text(SOURCE)
    return tmp_path


def trial(folder: Path, spec: TaskSpec) -> Trial:
    return Trial(load_task(spec, folder), spec, folder, location="task")


def tried(folder: Path, name: str, thorough: bool = True) -> str:
    spec = TaskSpec(use=f"tried_task:{name}", reward_timeout_s=1.0)
    return trial(folder, spec).run([ROWS, HELD_OUT], thorough)


def test_working_rewards_and_environments_are_counted(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert tried(folder, "fine") == "called on the first rows: rewards (9)"
    assert tried(folder, "fine", thorough=False) == "called on the first rows: rewards (1)"
    assert tried(folder, "group") == "called on the first rows: rewards (3)"
    assert tried(folder, "group", thorough=False) == "called on the first rows: rewards (1)"
    assert tried(folder, "Guess") == "called on the first rows: environments (3)"
    assert tried(folder, "Guess", thorough=False) == tried(folder, "agent") == "not tried"
    assert capfd.readouterr().out == "", "what rewards print would be between the checks"


def test_the_tools_in_the_documentation_are_tried(folder: Path) -> None:
    (source,), (row,), (spec,) = (
        code_blocks("agents.md", "## Tools", language) for language in ("python", "json", "yaml")
    )
    (folder / "weather.py").write_text(source)
    (folder / "rows.jsonl").write_text(row)
    (folder / "spec.yaml").write_text(spec)
    task_spec = load_spec(folder / "spec.yaml").spec.task
    prompts = [Prompt("a", json.loads(row)["prompt"], json.loads(row))]
    assert trial(folder, task_spec).run([prompts], thorough=True) == "called on the first rows: environments (1)"
    task = load_task(task_spec, folder)
    definition = json.dumps(task.environment(prompts[0]).tools)
    assert "Noon temperature in degrees Celsius." in definition and "days from today" in definition


def test_parts_of_the_reward_that_no_response_has_are_refused(folder: Path) -> None:
    parts = trial(folder, TaskSpec(use="tried_task:parts"))
    assert parts.run([ROWS], thorough=True) == "called on the first rows: rewards (6)"
    parts.check_parts(["reward", "format"])
    with pytest.raises(ConfigError, match="no response of the trial has the metric 'fromat'") as refused:
        parts.check_parts(["reward", "fromat"])
    assert "the task reports reward, format" in refused.value.message
    assert refused.value.location == "algorithm.reward_parts.fromat"


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        (
            "short",
            "def short",
            "returned 1 rewards for the 4 responses of prompt 'a'; return a list with a result for each",
        ),
        ("text", "def text", "returned '1' for prompt 'a'; return a finite number"),
        ("other_column", '["solution"]', "KeyError: 'solution' (called with the response '')"),
        ("empty", "response.split()", "IndexError"),
        ("hangs", "", "took more than 1 s on prompt 'a'"),
        ("ends", "", "its process ended (exit status 3)"),
        ("Broken", "return prompt", "NameError"),
        ("Tools", "def weather", "tool weather(*cities)"),
        ("Judge", "def judge(self, prompt, text): return '1'", "the reward '1', which is not a finite number"),
    ],
)
def test_a_failure_is_refused_at_its_line(folder: Path, name: str, line: str, says: str) -> None:
    with pytest.raises(TaskError) as refused:
        tried(folder, name)
    file, _, number = refused.value.location.rpartition(":")
    if line:
        assert file == str(folder / "tried_task.py")
        assert line in SOURCE.splitlines()[int(number) - 1]
    assert says in refused.value.message
    assert refused.value.hint


def test_other_columns_of_held_out_rows_are_found(folder: Path) -> None:
    spec = TaskSpec(use="tried_task:fine")
    with pytest.raises(TaskError, match="failed on prompt 'c': KeyError: 'answer'"):
        trial(folder, spec).run([ROWS, [Prompt("c", "0+1=")]], thorough=True)


def test_a_ready_task_whose_server_does_not_run_yet_is_a_warning(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"prompt": "?", "answer": "4"}\n')
    judge = "{use: judge, options: {base_url: 'http://127.0.0.1:9/v1', model: m, retries: 0}}"
    (folder / "spec.yaml").write_text(
        f"model: {{path: some/model}}\ntask: {judge}\ndata: {{train: {{path: rows.jsonl}}}}\nstop: {{steps: 1}}\n"
    )

    def found(*overrides: str) -> Finding:
        spec = load_spec(folder / "spec.yaml", overrides).spec
        with StartChecks(spec, folder, pytest.fail, thorough=True) as checks:
            *_, rewards = findings_of(check for check in checks._checks() if check.name in ("task and data", "rewards"))
        return rewards

    alone = found()
    assert (alone.status, "Connection error" in alone.found) == ("warning", True), alone
    with_own = found(
        f"evaluation.sets={{hard: {{data: {{path: {folder}/rows.jsonl}}, task: {{use: 'tried_task:text'}}}}}}"
    )
    assert (with_own.status, "returned '1'" in with_own.found) == ("failure", True), "the other tasks are tried"
    masks_all = found("task={use: 'tried_task:nothing'}")
    assert masks_all.status == "warning"
    assert "every reward is None" in masks_all.found and "return statement" in masks_all.hint
