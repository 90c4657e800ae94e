"""A run's folder: one driver at a time, files that are replaced atomically, and a state that survives crashes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.runs.directory import SUBFOLDERS, Phase, RunDirectory, RunState

pytestmark = pytest.mark.slow

DRIVER = """
import signal, sys
from pathlib import Path
from asyncrl_cli.runs.directory import RunDirectory
run = RunDirectory(Path(sys.argv[1]))
run.lock()
run.update(phase="running", step=3)
print("driving", flush=True)
signal.pause()
"""
WRITER = """
import sys
from pathlib import Path
from asyncrl_cli.runs.directory import RunDirectory
run, number = RunDirectory(Path(sys.argv[1])), 0
print("writing", flush=True)
while True:
    number += 1
    run.write_json("state.json", [number] * 40_000)
"""


@contextmanager
def process(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start a Python process, and wait for its first line."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline(), "the process failed"
            yield running
        finally:
            running.kill()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs", "test")


def test_create_makes_the_folders_and_drives(run: RunDirectory) -> None:
    assert run.run_id.startswith("test-")
    assert run.path.is_absolute()
    assert all((run.path / folder).is_dir() for folder in SUBFOLDERS)
    assert run.is_driven
    assert (run.path / "lock").read_text() == f"pid {os.getpid()} on {os.uname().nodename}"


def test_create_below_a_file_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        RunError, match=r"file/runs/.*: the run's folder cannot be made: Not a directory \(set runs_dir"
    ):
        RunDirectory.create(tmp_path / "file/runs", "test")


def test_one_driver_at_a_time_across_processes(run: RunDirectory) -> None:
    run.unlock()
    with process(DRIVER, run.path) as driver:
        reader = RunDirectory(run.path)
        assert reader.is_driven
        with pytest.raises(RunError, match=f"the run is being driven by pid {driver.pid} on "):
            reader.lock()
        assert reader.state.step == 3


def test_a_killed_driver_frees_the_run(run: RunDirectory) -> None:
    run.unlock()
    with process(DRIVER, run.path) as driver:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        reader = RunDirectory(run.path)
        assert not reader.is_driven
        assert (reader.state.phase, reader.state.step) == ("running", 3)
        reader.lock()
        assert (run.path / "lock").read_text().startswith(f"pid {os.getpid()} ")


def test_a_child_of_the_driver_does_not_keep_the_lock(run: RunDirectory) -> None:
    with process("import signal; print('up', flush=True); signal.pause()"):
        run.unlock()
        assert not run.is_driven


def test_checks_of_the_lock_never_keep_a_driver_out(run: RunDirectory) -> None:
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            assert RunDirectory(run.path).is_driven in (True, False)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(100):
            run.unlock()
            run.lock()
    finally:
        stop.set()
        looking.join()


def test_a_reader_never_sees_half_a_file(run: RunDirectory) -> None:
    run.write_json("state.json", [0] * 40_000)
    with process(WRITER, run.path):
        seen = set()
        while len(seen) < 25:
            values = json.loads((run.path / "state.json").read_text())
            assert len(values) == 40_000
            assert len(set(values)) == 1
            seen.add(values[0])


def test_a_link_in_a_run_is_replaced_and_not_followed(run: RunDirectory, tmp_path: Path) -> None:
    target = tmp_path / "another.yaml"
    target.write_text("kept")
    (run.path / "spec.yaml").symlink_to(target)
    run.write_text("spec.yaml", "name: a\n", private=True)
    assert target.read_text() == "kept"
    assert stat.S_IMODE((run.path / "spec.yaml").lstat().st_mode) == 0o600


@given(
    phase=st.sampled_from(["starting", "running", "finished", "interrupted", "failed"]),
    numbers=st.lists(st.integers(0, 10**9), min_size=3, max_size=3),
    accuracy=st.dictionaries(st.sampled_from(["greedy", "sampled"]), st.floats(0, 1)),
    reason=st.text(st.characters(exclude_categories=())),
)
@example("failed", [3, 4, 1], {}, "a reason with bytes that are not text: a\udcffb")
@settings(deadline=None, max_examples=30)
def test_state_survives_the_disk(
    tmp_path_factory: pytest.TempPathFactory, phase: Phase, numbers: list[int], accuracy: dict[str, float], reason: str
) -> None:
    path = tmp_path_factory.mktemp("run")
    step, steps, version = numbers
    changes = {"phase": phase, "step": step, "steps": steps, "version": version}
    written = RunDirectory(path).update(**changes, accuracy=accuracy, reason=reason)
    assert RunDirectory(path).state == written
    assert written == RunState(**changes, accuracy=accuracy, reason=reason, updated=written.updated)
    assert written.updated > 0


FULL = """
import subprocess, sys
from pathlib import Path
from asyncrl_cli.runs.directory import RunDirectory
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", sys.argv[1]], check=True)
run = RunDirectory(Path(sys.argv[1]))
run.update(phase="running", step=3)
run.append("metrics.jsonl", {"step": 3})
for name, size in (("large", 2**20), ("rest", 1)):
    try:
        for _ in range(100):
            with (run.path / name).open("ab", buffering=0) as file:
                file.write(bytes(size))
            run.append("metrics.jsonl", {"step": 4, "text": 500 * "x"})
    except OSError as error:
        print(error.strerror)
lines = (run.path / "metrics.jsonl").read_text().splitlines()
print(len(lines) == len(run.read("metrics.jsonl")), len(lines) >= 1)
"""


def test_on_a_full_disk_lines_are_complete(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("no mount namespace can be created here")
    command = ["unshare", "-rm", sys.executable, "-c", FULL, str(tmp_path)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.stdout.splitlines() == [*2 * ["No space left on device"], "True True"], ended.stderr


@pytest.mark.parametrize("problem", ["read-only", "no rights", "gone"])
def test_a_run_that_cannot_be_locked_says_so(run: RunDirectory, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run.unlock()
    if problem == "gone":
        shutil.rmtree(run.path)
        with pytest.raises(RunError, match="the run's folder is gone"):
            run.lock()
        return
    refusal = OSError(*((30, "Read-only file system") if problem == "read-only" else (13, "Permission denied")))
    opened = os.open

    def refuse(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_CREAT:
            raise refusal
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RunError, match=rf"lock: the run cannot be locked: {refusal.strerror} \(.*copy the folder"):
        run.lock()


def test_a_start_that_cannot_be_written_says_where(run: RunDirectory) -> None:
    run.begin("name: test", 3, {"host": "here"})
    assert (run.manifest, run.state.phase, run.state.steps) == ({"host": "here"}, "starting", 3)
    (run.path / "spec.yaml").unlink()
    (run.path / "spec.yaml").mkdir()
    with pytest.raises(RunError, match="the run's folder cannot be written: Is a directory"):
        run.begin("name: test", 4)


def test_update_keeps_the_other_fields(run: RunDirectory) -> None:
    run.update(steps=100, accuracy={"greedy": 0.5})
    run.update(step=7)
    after = RunDirectory(run.path).update(phase="finished")
    assert (after.steps, after.step, after.phase, after.accuracy) == (100, 7, "finished", {"greedy": 0.5})
    with pytest.raises(TypeError):
        run.update(stepp=8)
    assert RunDirectory(run.path).state == after


@pytest.mark.parametrize("damage", [b"", b"{", b'{"step": 3', b"[1]", b"null", b"\xff\xfe", b'{"unknown": 1}'])
def test_a_damaged_state_reads_as_a_fresh_start(run: RunDirectory, damage: bytes) -> None:
    (run.path / "state.json").write_bytes(damage)
    (run.path / "manifest.json").write_bytes(damage)
    assert RunDirectory(run.path).state == RunState()
    assert RunDirectory(run.path).manifest in ({}, {"unknown": 1})


def test_lines_are_read_back_without_the_broken_ones(run: RunDirectory) -> None:
    assert run.read("metrics.jsonl") == []
    run.append("metrics.jsonl", {"step": 1, "reward/mean": 0.25})
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "rew')  # a full disk
    run.append("metrics.jsonl", {"step": 2})
    run.append("metrics.jsonl", {"step": 3})
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "caf\xc3')  # a killed process
    assert run.read("metrics.jsonl") == [{"step": 1, "reward/mean": 0.25}, {"step": 3}]
