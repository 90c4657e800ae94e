"""`asyncrl events`: lines for people and for programs, also of a live run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl_cli.journal.schema import FILE
from tests.cli.conftest import Done
from tests.journal import recorded_run
from tests.journal.recorded_run import RecordedRun, make_run, settings

Ask = Callable[..., tuple[object, str]]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    """Two steps of a run, and a fault."""
    monkeypatch.setattr(recorded_run, "METRICS", {**recorded_run.METRICS, "reward/mean": 0.5})
    run = make_run(tmp_path)
    recorded = RecordedRun(run.path / FILE, monkeypatch, settings(max_staleness=2), lambda _: 3.0, 4)
    recorded.step()
    recorded.step()
    recorded.book.journal.failed("engine", "engine-1", "the process\n died")
    recorded.commit()
    return recorded


@pytest.fixture
def ask(asyncrl: Callable[..., Done], tmp_path: Path) -> Ask:
    """Run `asyncrl events ...`; gives exit code and output."""

    def run(*arguments: str) -> tuple[object, str]:
        (folder,) = {path.parent.parent for path in tmp_path.rglob(FILE)}
        done = asyncrl("events", *arguments, "--runs-dir", folder)
        return done.code, done.out

    return run


def test_an_event_line_has_its_time_and_facts(ask: Ask, recorded: RecordedRun) -> None:
    code, shown = ask("--kind", "step", "--kind", "fault")
    assert code == 0
    first, second, fault = shown.splitlines()
    assert "  step        step 1, " in first
    assert second.endswith(", reward/mean 0.5")
    assert fault.endswith("  fault       kind engine, part engine-1, message the process died")


def test_json_lines_have_every_field(ask: Ask, recorded: RecordedRun) -> None:
    code, shown = ask("--json")
    events = [json.loads(line) for line in shown.splitlines()]
    assert code == 0
    assert {event["event"] for event in events} >= {"start", "admit", "finish", "score", "batch", "step", "publish"}
    (fault,) = [event for event in events if event["event"] == "fault"]
    assert fault.keys() == {"event", "at", "kind", "part", "message"}


def test_an_unknown_kind_of_event_is_refused(recorded: RecordedRun, asyncrl: Callable[..., Done]) -> None:
    ended = asyncrl("events", "--kind", "steps")
    assert ended.code == 2
    assert "known: start, admit" in " ".join(ended.err.replace("│", " ").split())
