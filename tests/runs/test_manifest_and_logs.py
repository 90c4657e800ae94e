"""The manifest of a run, the output of its processes, and the texts of errors."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl_cli import __version__
from asyncrl_cli.core.errors import RunError, UserError
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.runs.manifest import describe_start

REDIRECTED = """
import os, subprocess, sys
from asyncrl_cli.system.logs import redirect_output
print("before")
redirect_output(sys.argv[1], "worker")
print("printed", flush=True)
print("complained", file=sys.stderr)
os.write(1, b"written by C\\n")
subprocess.run([sys.executable, "-c", "print('from a child')"])
"""


def test_output_goes_to_the_log_also_from_children_and_c(tmp_path: Path) -> None:
    (tmp_path / "worker.log").write_text("of an earlier process\n")
    done = subprocess.run([sys.executable, "-c", REDIRECTED, str(tmp_path)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("before\n", "")
    expected = ["of an earlier process", "printed", "complained", "written by C", "from a child"]
    assert (tmp_path / "worker.log").read_text().splitlines() == expected


VERBOSE = """
import sys
from asyncrl_cli.system import logs
from tests.journal.recorded_run import make_run
logs.LOG_BYTES = 1000
logs.bound_log()
logs.redirect_output(sys.argv[1], "scorer")
for number in range(200):
    print(f"call {number}", "x" * 100, flush=True)
    logs.bound_log()
"""


def test_a_full_log_is_replaced_and_the_newest_output_stays(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", VERBOSE, str(tmp_path)], check=True)
    newest, before = ((tmp_path / name).read_text() for name in ("scorer.log", "scorer.log.1"))
    assert len(list(tmp_path.iterdir())) == 2
    assert len(newest) < 1200 and 1000 <= len(before) < 1200
    assert newest.startswith("[asyncrl: the output before this is in scorer.log.1]")
    assert "call 199" in newest
    assert all(f"call {number} " in before + newest for number in range(191, 200))


def test_the_manifest_says_where_the_run_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tmp_path / "code/spec.yaml"
    spec.parent.mkdir()
    spec.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["asyncrl", "train", "code/spec.yaml"])
    manifest = describe_start(Path("code/spec.yaml"))
    assert manifest["spec_file"] == str(spec)
    assert manifest["directory"] == str(tmp_path)
    assert manifest["command"] == ["asyncrl", "train", "code/spec.yaml"]
    assert manifest["asyncrl"] == __version__
    assert {"torch", "ray", "pydantic"} <= manifest["packages"].keys()
    assert manifest["git"] is None
    run = RunDirectory(tmp_path)
    run.write_json("manifest.json", manifest)
    assert run.manifest == json.loads(json.dumps(manifest))


def test_the_manifest_knows_the_code(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    spec = tmp_path / "spec.yaml"
    spec.write_text("a")
    git("init")
    assert describe_start(spec)["git"] is None, "no commit yet"
    git("add", ".")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert describe_start(spec)["git"] == {"commit": commit, "dirty": False}
    spec.write_text("b")
    assert describe_start(spec)["git"] == {"commit": commit, "dirty": True}


def test_an_error_is_a_diagnostic_and_is_the_same_in_another_process() -> None:
    error = RunError("it broke", location="engine-0", hint="fix it")
    assert str(error) == "engine-0: it broke (fix it)"
    assert error.diagnostic() == "error: it broke\n --> engine-0\nhint: fix it"
    assert (str(UserError("it broke")), UserError("it broke").diagnostic()) == ("it broke", "error: it broke")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.exit_code) == (RunError, str(error), 1)
