"""Finding runs by id, prefix, path and age."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.runs.catalogue import all_runs, find_run
from asyncrl_cli.runs.directory import DEFAULT_RUNS, RunDirectory


def make(runs_dir: Path, run_id: str, started: str) -> RunDirectory:
    run = RunDirectory(runs_dir / run_id)
    run.path.mkdir(parents=True)
    run.write_json("manifest.json", {"started": started})
    return run


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    make(tmp_path, "b-1", "2026-01-01T10:00:00+00:00")
    make(tmp_path, "a-12", "2026-01-02T10:00:00+00:00")
    make(tmp_path, "a-1", "2026-01-03T10:00:00+00:00")
    (tmp_path / "mlflow-artifacts").mkdir()
    (tmp_path / "mlflow.db").touch()
    return tmp_path


def test_oldest_first_whatever_was_written_last(runs_dir: Path) -> None:
    first = runs_dir / "b-1"
    RunDirectory(first).write_json("manifest.json", RunDirectory(first).manifest | {"mlflow_run_id": "x"})
    os.utime(first / "manifest.json", (2**31, 2**31))
    assert [run.run_id for run in all_runs(runs_dir)] == ["b-1", "a-12", "a-1"]
    assert find_run(runs_dir, "latest").run_id == "a-1"


def test_a_run_without_a_readable_manifest_is_still_listed(runs_dir: Path) -> None:
    (runs_dir / "a-1/manifest.json").write_text("{")
    assert [run.run_id for run in all_runs(runs_dir)] == ["a-1", "b-1", "a-12"]


def test_no_folder_no_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert all_runs(DEFAULT_RUNS) == []
    with pytest.raises(RunError, match=r"there is no run yet \(start one: asyncrl train SPEC\)"):
        find_run(DEFAULT_RUNS, "latest")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"missing: no such folder \(give the folder"):
        find_run(tmp_path / "missing", "latest")
    with pytest.raises(RunError, match="file: not a folder"):
        all_runs(tmp_path / "file")


def test_a_folder_is_a_path_also_without_a_slash(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs_dir)
    assert find_run(DEFAULT_RUNS, "b-1").path == runs_dir / "b-1"
    assert find_run(DEFAULT_RUNS, find_run(Path(), "a-12").argument).path == runs_dir / "a-12"
    monkeypatch.chdir(runs_dir / "a-1")
    assert find_run(DEFAULT_RUNS, ".").path == runs_dir / "a-1"


def test_a_command_is_given_the_id_or_the_path(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_run(runs_dir, "b").argument == str(runs_dir / "b-1")
    assert find_run(runs_dir, find_run(runs_dir, "b").argument).run_id == "b-1"
    monkeypatch.chdir(runs_dir.parent)
    runs_dir.rename("runs")
    assert find_run(DEFAULT_RUNS, "b").argument == "b-1"


@pytest.mark.parametrize(("name", "run_id"), [("b", "b-1"), ("a-12", "a-12"), ("a-1", "a-1"), ("latest", "a-1")])
def test_an_id_wins_over_a_prefix(runs_dir: Path, name: str, run_id: str) -> None:
    assert find_run(runs_dir, name).run_id == run_id


def test_an_ambiguous_prefix_lists_the_matches(runs_dir: Path) -> None:
    with pytest.raises(RunError, match=r"'a-' matches 2 runs: a-12, a-1 \(give more characters of the id\)"):
        find_run(runs_dir, "a-")


@pytest.mark.parametrize("name", ["c", "/" + "x" * 5000], ids=["unknown", "too long for a path"])
def test_an_unknown_name_names_the_folder(runs_dir: Path, name: str) -> None:
    with pytest.raises(RunError, match=rf"no run is called '{name}' \(list the runs: asyncrl runs\)") as error:
        find_run(runs_dir, name)
    assert error.value.location == str(runs_dir)


def test_a_path_needs_no_runs_folder(
    runs_dir: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(runs_dir.parent)
    assert find_run(elsewhere, f"{runs_dir.name}/a-1").path == runs_dir / "a-1"
    assert find_run(elsewhere, str(runs_dir / "b-1")).path == runs_dir / "b-1"
