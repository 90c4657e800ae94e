"""Rotating tests: each commit draws two files, and over the commits every file is drawn."""

from __future__ import annotations

from tests.conftest import drawn_files

FILES = [f"test_{number}.py" for number in range(15)]


def test_a_commit_draws_two_files_in_every_process() -> None:
    drawn = drawn_files(FILES, "c0ffee")
    assert len(drawn) == 2
    assert drawn == drawn_files(FILES[::-1], "c0ffee")


def test_every_file_is_drawn_by_some_commit() -> None:
    assert set().union(*(drawn_files(FILES, f"{number:040x}") for number in range(100))) == set(FILES)


def test_fewer_files_than_a_commit_draws_all_run() -> None:
    assert drawn_files(FILES[:1], "") == {FILES[0]}
