"""The command `asyncrl validate-spec`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl_cli.spec.load import load_spec
from tests.cli.conftest import Done

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "specs/quickstart.yaml")
BROKEN = str(ROOT / "tests/fixtures/broken.yaml")
Command = Callable[..., Done]
HEAVY = ("torch", "ray", "vllm", "deepspeed", "mlflow", "numpy", "rich")


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


def test_a_valid_spec_is_one_line(asyncrl: Command) -> None:
    assert asyncrl("validate-spec", QUICKSTART) == (
        0,
        f"{QUICKSTART} is valid: quickstart runs 60 steps of 32 groups of 8 rollouts, async with staleness of at most "
        "2, with 1 engine on CPU and 1 trainer rank on CPU\n",
        "",
    )


def test_a_broken_spec_ends_with_2_and_no_traceback(asyncrl: Command) -> None:
    code, out, err = asyncrl("validate-spec", BROKEN)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: seeds: unknown key\n --> {BROKEN}:3:1\nhint: did you mean `seed`?\n")
    assert "Traceback" not in err
    assert "Traceback" in asyncrl("--debug", "validate-spec", BROKEN)[2]


USER_CODE = """
import numpy as np
from os.path import join as joined
if True:
    LIMIT: int = 3
    first, (second, *others) = 1, (2, 3)
def loss(): inside = 1
async def agent(prompt, model): pass
class Task:
    def reward(self): pass
"""


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("algorithm.loss=my_code:loss", ""),
        ("algorithm.loss=my_code:los", "algorithm.loss: module my_code ({folder}/my_code.py) has no 'los'"),
        ("algorithm.loss=my_cod:loss", "algorithm.loss: no module 'my_cod' in {folder} or on Python's path"),
        ("algorithm.advantage=my_code:inside", "has no 'inside'"),
        ("algorithm.advantage=my_code:reward", "has no 'reward'"),
        *(
            (f"algorithm.advantage=my_code:{name}", "")
            for name in ("LIMIT", "first", "others", "joined", "np", "agent")
        ),
        ("algorithm.advantage=my_code:Task.reward", ""),
        ("algorithm.advantage=package.inner:f", ""),
        ("algorithm.advantage=package.inner:g", "has no 'g'"),
        ("algorithm.advantage=package.outer:g", "no module 'package.outer'"),
        ("algorithm.advantage=my_code.inner:g", "no module 'my_code.inner'"),
        ("algorithm.advantage=package:inner", ""),
        ("algorithm.advantage=everything:anything", ""),
        ("algorithm.advantage=made:anything", ""),
        ("algorithm.advantage=broken:f", "is not valid Python: "),
        ("algorithm.advantage=math:sqrt", ""),
        ("algorithm.advantage=json:dumps", ""),
        ("algorithm.advantage=json:dump_it", "has no 'dump_it'"),
        ("task.use=nowhere:reward", "task.use: no module 'nowhere'"),
        ("tracking.monitors=[my_code:Task,my_code:Nothing]", "tracking.monitors.1: module my_code"),
        ("data.train.path=my_code:rows", "data.train.path: module my_code"),
        ("data.train.path=[my_code:agent,my_code:rows]", "data.train.path.1: module my_code"),
        ('task={use: command, options: {command: x, reward: "my_code:f"}}', "task.options.reward: module my_code"),
        ("task={use: 'my_code:Task', options: {reward: 'any:text', url: 'judge:port'}}", ""),
    ],
)
def test_names_of_the_users_code_are_looked_up_without_an_import(
    asyncrl: Command, tmp_path: Path, assignment: str, message: str
) -> None:
    (tmp_path / "spec.yaml").write_text(f"extends: {QUICKSTART}")
    (tmp_path / "my_code.py").write_text(USER_CODE)
    (tmp_path / "everything.py").write_text("from os import *")
    (tmp_path / "made.py").write_text("globals()['anything'] = 1")
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "package/inner.py").write_text("def f(): pass")
    code, _, error = asyncrl("validate-spec", str(tmp_path / "spec.yaml"), "--set", assignment)
    assert (code, message.format(folder=tmp_path) in error) == (2 if message else 0, True), error


def test_warnings_do_not_fail(asyncrl: Command) -> None:
    code, out, err = asyncrl("validate-spec", QUICKSTART, "--set", "algorithm.correction.preset=decoupled")
    assert code == 0 and "is valid" in out
    assert err.startswith("warning: algorithm.correction.level: no correction for rollouts")


def test_a_sandbox_that_this_machine_lacks_is_a_warning(asyncrl: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = str(ROOT / "templates/bugfix-agent/spec.yaml")
    monkeypatch.setenv("PATH", "/nowhere")
    code, out, err = asyncrl("validate-spec", spec)
    assert code == 0 and "is valid" in out
    lacks = "warning: task.sandbox: this machine cannot start the sandbox: bwrap is not installed"
    assert err.startswith(f"{lacks}\n --> {spec}\nhint: install bubblewrap")
    assert json.loads(asyncrl("validate-spec", spec, "--json")[1])["problems"][0]["path"] == "task.sandbox"
    assert asyncrl("validate-spec", spec, "--set", "task.sandbox.kind=none")[2] == ""


def test_json_has_all_problems(asyncrl: Command) -> None:
    code, out, err = asyncrl("validate-spec", BROKEN, "--json")
    document = json.loads(out)
    assert (code, err, document["valid"]) == (2, "", False)
    assert document["problems"][0] == {
        "path": "seeds",
        "message": "unknown key",
        "hint": "did you mean `seed`?",
        "severity": "error",
        "file": BROKEN,
        "line": 3,
        "column": 1,
    }
    code, out, _ = asyncrl("validate-spec", QUICKSTART, "--json")
    assert code == 0 and json.loads(out) == {"spec": QUICKSTART, "valid": True, "problems": []}


def test_the_resolved_spec_loads_again(asyncrl: Command, tmp_path: Path) -> None:
    rare = 'task.options={"a\u200d": "\u2028\u00a0\U000e0001"}'
    _, first, _ = asyncrl("validate-spec", QUICKSTART, "--resolved", "--set", "seed=7", "--set", rare)
    (tmp_path / "resolved.yaml").write_text(first)
    _, second, _ = asyncrl("validate-spec", str(tmp_path / "resolved.yaml"), "--resolved")
    assert load_spec(tmp_path / "resolved.yaml").spec.task.options == {"a\u200d": "\u2028\u00a0\U000e0001"}
    assert first == second and "seed: 7" in first and "stall_minutes: 10.0" in first


def test_schema_needs_no_spec(asyncrl: Command) -> None:
    code, out, _ = asyncrl("validate-spec", "--schema")
    assert code == 0 and json.loads(out)["title"] == "ExperimentSpec"
    assert asyncrl("validate-spec")[0] == 2


def test_several_specs_are_checked_together(asyncrl: Command) -> None:
    code, out, err = asyncrl("validate-spec", QUICKSTART, BROKEN)
    assert code == 2 and out.startswith(f"{QUICKSTART} is valid") and "17 errors" in err
    code, out, err = asyncrl("validate-spec", QUICKSTART, BROKEN, "--json")
    assert (code, err, [spec["valid"] for spec in json.loads(out)]) == (2, "", [True, False])
    assert asyncrl("validate-spec", QUICKSTART, QUICKSTART)[0] == 0
    assert asyncrl("validate-spec", QUICKSTART, QUICKSTART, "--resolved")[0] == 2


@pytest.mark.parametrize("arguments", [["--help"], ["validate-spec", QUICKSTART]])
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    script = (
        "import sys, asyncrl_cli.cli.app as a\n"
        f"sys.argv = ['asyncrl', *{arguments!r}]\n"
        "try: a.main()\n"
        "except SystemExit as end: assert not end.code\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sp/another.yaml", "check the path"),
        ("sp/task", "name its spec: sp/task/spec.yaml"),
        ("sp/run-1", "asyncrl resume sp/run-1/"),
        ("sp", "name a YAML file"),
    ],
)
def test_a_path_without_a_spec_has_a_hint(
    asyncrl: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hint: str
) -> None:
    for file in ("quickstart.yaml", "task/spec.yaml", "run-1/spec.yaml", "run-1/manifest.json"):
        (tmp_path / "sp" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sp" / file).touch()
    monkeypatch.chdir(tmp_path)
    code, _, err = asyncrl("validate-spec", name)
    assert code == 2 and hint in err
