"""The wheel is complete: it has everything that commands need at run time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.inspect.made_runs import SITUATIONS, made_run
from tests.journal.recorded_run import make_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, outside the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = folder.glob("asyncrl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


LIGHT = """
import sys
from importlib.metadata import packages_distributions, requires
from packaging.requirements import Requirement

def closure(name, extras, found):
    for requirement in map(Requirement, requires(name) or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (extras or {""})):
            if (own := requirement.name.lower().replace("_", "-")) not in found:
                found.add(own)
                closure(own, requirement.extras, found)
    return found

allowed = {"asyncrl", *closure("asyncrl", (), set())}
for module, packages in packages_distributions().items():
    if not any(package.lower().replace("_", "-") in allowed for package in packages):
        sys.modules.setdefault(module, None)  # the import system's mark of a module that cannot be found
"""
"""Hides every package that `pip install asyncrl`, without extras, would not install."""


ALL = """
import contextlib, io, json, sys
import asyncrl_cli
from asyncrl_cli.cli.app import main

installed, commands = json.load(sys.stdin)
assert asyncrl_cli.__file__.startswith(installed), asyncrl_cli.__file__
for command in commands:
    sys.argv = ["asyncrl", *command]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ended:
        print(json.dumps([ended.code, out.getvalue(), err.getvalue()]))
"""
"""Runs commands one after another; prints the exit code and the output of each."""


def _asyncrl(
    installed: Path, folder: Path, *commands: Sequence[str], light: bool = False
) -> list[tuple[int, str, str]]:
    """Run commands in one process; gives the exit code and the output of each."""
    done = subprocess.run(
        [sys.executable, "-c", (LIGHT if light else "") + ALL],
        input=json.dumps([str(installed), commands]),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ended = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ended) == len(commands), done
    return ended


def test_every_template_and_page_is_in_the_wheel(installed: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "templates", "asyncrl_cli"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert tracked
    for path in tracked:
        inside = path.replace("templates/", "asyncrl_cli/_templates/", 1) if path.startswith("templates/") else path
        assert (installed / inside).is_file(), path


RUN = ("latest", "--runs-dir", "runs")
LIGHT_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("validate-spec", "mine/spec.yaml"),
    ("convert", "verl", "trainer.total_training_steps=10", "data.train_files=mine/prompts.jsonl", "-o", "out.yaml"),
    ("runs", "--runs-dir", "runs"),
    ("inspect", "run", *RUN),
    ("inspect", "buffer", *RUN),
    ("inspect", "buffer", *RUN, "--group", "0"),
    ("inspect", "buffer", *RUN, "--rollout", "0-0"),
    ("events", *RUN),
    ("staleness", *RUN),
    ("watch", *RUN),
    ("report", *RUN, "-o", "report.html"),
    ("checkpoint", "list", *RUN),
    ("plan", "mine/spec.yaml", "--calibrate-from", "runs/made"),
)


@pytest.mark.slow
def test_the_light_installation_has_what_looking_and_planning_need(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = (("init", "reward-function", "mine"), ("validate-spec", "mine/spec.yaml", "--resolved"))
    made, resolved = _asyncrl(installed, tmp_path, *started, light=True)
    assert (made[0], resolved[0]) == (0, 0), (made, resolved)
    run = made_run(tmp_path / "runs", monkeypatch, SITUATIONS["slow trainer"], steps=30, run_id="made")
    (run.path / "spec.yaml").write_text(resolved[1])
    ended = _asyncrl(installed, tmp_path, *LIGHT_COMMANDS, light=True)
    assert [(command, err) for command, (code, _, err) in zip(LIGHT_COMMANDS, ended, strict=True) if code] == []
    assert run.run_id in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_command_of_the_light_installation_names_the_extra_that_it_needs(installed: Path, tmp_path: Path) -> None:
    needs = {
        "fastapi": ("train", "mine/spec.yaml"),
        "mlflow": ("track", *RUN),
        "transformers": ("validate-spec", "mine/spec.yaml", "--memory"),
    }
    make_run(tmp_path / "runs", steps=3)
    made, *refused = _asyncrl(installed, tmp_path, ("init", "reward-function", "mine"), *needs.values(), light=True)
    assert made[0] == 0
    for package, (code, _, error) in zip(needs, refused, strict=True):
        assert code == 2
        assert error.splitlines()[0].startswith("error: asyncrl[cpu] or asyncrl[gpu] is not installed: engines")
        assert f"(no package {package})" in error
        assert "-m pip install 'asyncrl[cpu]'" in error and "asyncrl[gpu]" in error
