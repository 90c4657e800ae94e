"""The stream of events: everything in the journal, in order, each event once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from asyncrl_cli.inspect.history_page import run_events
from asyncrl_cli.journal.events import QUERIES, events
from asyncrl_cli.journal.queries import snapshot
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.records.generation import EngineRequest
from asyncrl_cli.runs.directory import RunDirectory
from tests.journal.recorded_run import STARTED, RecordedRun, make_run, settings

DOCUMENTED = Path(__file__).parents[2] / "docs" / "journal.md"


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    run = make_run(tmp_path)
    return RecordedRun(run.path / FILE, monkeypatch, settings(max_staleness=2), lambda g: 3.0 + 4 * (g % 3), 4)


def five_steps(recorded: RecordedRun, path: Path) -> None:
    """Five steps with a crash, and one event of every other kind."""
    journal = recorded.book.journal
    for _ in range(3):
        recorded.step()
    journal.checkpointed(3, "step-3", 1.5)
    journal.evaluated(
        {"step": 3, "kind": "greedy", "accuracy": 0.5, "mean_reward": 0.5, "mean_length": 4}
        | {"prompts": 8, "oldest": 0, "newest": 3}
    )
    journal.failed("engine", "engine-1", "the process died")
    journal.failed("stall", "the trainer", "the trainer waits")
    journal.requested(EngineRequest("0-0", "engine-0", STARTED + 1, STARTED + 5, "stop"))
    journal.engine_changed("engine-1", "join", "")
    journal.engine_changed("engine-1", "leave", "its node is gone")
    recorded.commit()
    recorded.crash(60.0)
    recorded.step()
    recorded.step()


def path_of(tmp_path: Path) -> Path:
    (found,) = tmp_path.rglob(FILE)
    return found


def test_every_event_is_yielded_once_and_in_order(recorded: RecordedRun, tmp_path: Path) -> None:
    five_steps(recorded, tmp_path)
    with snapshot(path_of(tmp_path)) as connection:
        found = list(events(connection))

        def count(sql: str) -> int:
            return int(connection.execute(f"SELECT count(*) FROM {sql}").fetchone()[0])

        expected = {
            "start": 2,
            "admit": count("groups"),
            "segment": count("segments"),
            "finish": count("rollouts WHERE finish_reason IS NOT NULL"),
            "score": count("rollouts WHERE reward IS NOT NULL"),
            "group": count("groups WHERE ended_at IS NOT NULL"),
            "batch": 5,
            "step": 5,
            "publish": 6,
            **dict.fromkeys(("request", "join", "leave", "checkpoint", "eval", "fault", "stall"), 1),
        }
    assert Counter(event.name for event in found) == expected
    assert [event.at for event in found] == sorted(event.at for event in found)
    assert expected["score"] > 20


def test_only_requested_kinds_of_events_are_yielded(recorded: RecordedRun, tmp_path: Path) -> None:
    five_steps(recorded, tmp_path)
    with snapshot(path_of(tmp_path)) as connection:
        requested = [event.name for event in events(connection, ["step", "fault", "step"])]
    assert Counter(requested) == {"step": 5, "fault": 1}


def test_every_kind_and_field_is_documented(recorded: RecordedRun, tmp_path: Path) -> None:
    rows = {
        cells[0].strip("` "): cells[1]
        for line in DOCUMENTED.read_text().partition("\n## Events\n")[2].partition("\n## ")[0].splitlines()
        if line.startswith("| `") and (cells := line.strip("|").split("|"))
    }
    assert rows.keys() == QUERIES.keys()
    with snapshot(path_of(tmp_path)) as connection:
        for kind, query in QUERIES.items():
            columns = connection.execute(query).description[1:]
            assert [f"`{name}`" for name, *_ in columns] == rows[kind].strip().split(", ")


def test_events_that_wait_to_be_printed_do_not_block_the_log(recorded: RecordedRun, tmp_path: Path) -> None:
    """`asyncrl events | less` on a live run: SQLite empties the log when no snapshot of it is open."""
    recorded.step()
    journal, path = recorded.book.journal, path_of(tmp_path)
    assert run_events(RunDirectory(path.parent), ())
    journal.failed("engine", "engine-0", "later")
    recorded.commit()
    (busy, *_) = journal._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    assert not busy and path.with_name(f"{path.name}-wal").stat().st_size == 0
