"""Requests to a live run through its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.runs.scaling import (
    ANSWER,
    REQUEST,
    WANTED,
    answer_request,
    forget_requests,
    request_engines,
    wanted_engines,
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that this process drives."""
    made = RunDirectory.create(tmp_path, "run")
    made.update(phase="running")
    return made


BOUNDS = 1, 4


@contextmanager
def driver(run: RunDirectory) -> Iterator[list[int]]:
    """Answer one request; returns the accepted numbers."""
    accepted: list[int] = []

    def answer() -> None:
        while not (run.path / REQUEST).exists():
            pass
        while not (run.path / ANSWER).exists():
            accepted.extend(filter(None, [answer_request(run, BOUNDS)]))

    thread = Thread(target=answer)
    thread.start()
    yield accepted
    thread.join()


@pytest.mark.parametrize(("engines", "refused"), [(2, ""), (4, ""), (0, "0 is not between 1 and 4"), (5, "5 is not")])
def test_a_request_is_answered_once(run: RunDirectory, engines: int, refused: str) -> None:
    with driver(run) as accepted:
        answer = request_engines(RunDirectory(run.path), engines)
    assert answer.accepted == (not refused) and answer.message.startswith(refused)
    assert accepted == ([] if refused else [engines])
    assert answer_request(run, BOUNDS) is None, "an answered request is done"


def test_a_run_that_is_not_running_is_not_asked(run: RunDirectory) -> None:
    run.update(phase="finished")
    with pytest.raises(RunError, match="not running, its phase is finished"):
        request_engines(RunDirectory(run.path), 2)
    run.update(phase="running")
    run.unlock()
    with pytest.raises(RunError, match="its phase is died"):
        request_engines(RunDirectory(run.path), 2)
    assert not (run.path / REQUEST).exists()


def test_without_an_answer_the_request_is_withdrawn(run: RunDirectory) -> None:
    with pytest.raises(RunError, match="gave no answer within 0 s, and the request is withdrawn"):
        request_engines(RunDirectory(run.path), 2, timeout_s=0.0)
    assert answer_request(run, BOUNDS) is None


def test_a_new_driver_forgets_unanswered_requests(run: RunDirectory) -> None:
    run.write_json(REQUEST, {"id": "a", "engines": 2})
    run.write_json(ANSWER, {"id": "b", "accepted": True, "message": ""})
    forget_requests(run)
    assert answer_request(run, BOUNDS) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"id": 1, "engines": 2}', '{"id": "a", "engines": "2"}', '{"id": "a", "engines": null}']
)
def test_a_damaged_file_is_not_a_request(run: RunDirectory, text: str) -> None:
    (run.path / REQUEST).write_text(text)
    assert answer_request(run, BOUNDS) is None
    (run.path / ANSWER).write_text(text)
    (run.path / REQUEST).write_text(json.dumps({"id": "a", "engines": 2}))
    assert answer_request(run, BOUNDS) == 2


def test_the_number_asked_for_last_outlives_the_driver_unless_the_bounds_change(run: RunDirectory) -> None:
    assert wanted_engines(run, (1, 4)) is None
    for engines in (3, 2):
        run.write_json(REQUEST, {"id": str(engines), "engines": engines})
        assert answer_request(run, (1, 4)) == engines
    forget_requests(run)  # like the next driver
    assert wanted_engines(run, (1, 4)) == 2
    assert wanted_engines(run, (1, 8)) is None
    for text in ("", "[]", '{"engines": 9, "bounds": [1, 4]}', '{"engines": "2", "bounds": [1, 4]}'):
        (run.path / WANTED).write_text(text)
        assert wanted_engines(run, (1, 4)) is None
