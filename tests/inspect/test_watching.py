"""Watching a run from another process: the journal's data, at the same cost for a run of any length."""

from __future__ import annotations

import os
import pty
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

from asyncrl_cli.inspect.dashboard import look
from asyncrl_cli.journal.queries import overview, snapshot
from asyncrl_cli.journal.schema import FILE, open_for_writing, reading
from asyncrl_cli.runs.directory import RunDirectory
from tests.journal import recorded_run
from tests.journal.recorded_run import METRICS, RecordedRun, make_run, settings

pytestmark = pytest.mark.slow

SHOWN_METRICS = METRICS | {
    "reward/mean": 0.5,
    "response/tokens_mean": 4.0,
    "staleness/groups_mean": 1.0,
    "staleness/groups_max": 2.0,
    "tokens/generated_per_s": 20.0,
    "buffer/groups_taken": 6.0,
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path, phase="running")


@pytest.fixture
def recorded(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    """Three of 40 steps, with running and finished groups."""
    monkeypatch.setattr(recorded_run, "METRICS", SHOWN_METRICS)
    of = settings(max_staleness=2, total_steps=40)
    recorded = RecordedRun(run.path / FILE, monkeypatch, of, lambda g: 3.0 + 4 * (g % 3), concurrency=4)
    for _ in range(3):
        recorded.step()
    return recorded


def test_a_run_that_has_not_begun(run: RunDirectory) -> None:
    shown = look(run)
    assert (shown.activity, shown.metrics, shown.counts) == (f"{run.run_id}, died", {}, None)


def test_a_look_shows_the_journals_data(run: RunDirectory, recorded: RecordedRun) -> None:
    for part in ("engine-0", "engine-1", "engine-2", "engine-3"):
        recorded.book.journal.failed("engine", part, "gone")
    recorded.commit()
    shown = look(run)
    assert (shown.step, shown.steps, shown.version, shown.max_staleness) == (3, 40, 3, 2)
    assert (
        shown.metrics == SHOWN_METRICS | {"time/publish_s": recorded_run.PUBLISH_S}
        and shown.trends["reward/mean"] == [0.5] * 3
    )
    assert [fault.split(" ", 2)[2] for fault in shown.faults] == [f"engine-{at}: gone" for at in (1, 2, 3)]
    with snapshot(run.path / FILE) as connection:
        found = overview(connection)
    assert shown.due == found.due and shown.counts is not None
    by_state = {count.state: count.groups for count in found.states}
    assert (shown.counts.running, shown.counts.finished) == (by_state["running"], by_state["finished"])
    assert shown.counts.taken == by_state["trained"] == 6


def test_the_run_that_a_benchmark_makes_can_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/looking.py writes rows of the journal directly, so it has to follow the journal's schema."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    run = RunDirectory(import_module("looking").make_run(tmp_path / "run", rollouts=512))
    assert (look(run).step, look(run).version) == (2, 2)


def test_the_trainers_activity_follows_the_run(run: RunDirectory, recorded: RecordedRun) -> None:
    assert look(run).trainer == "", "it has no driver"
    run.lock()
    assert look(run, recorded.now + 2.0).trainer == "waits for the batch of step 4 for 2.0 s"
    left = look(run).remaining_s
    recorded.take()
    assert look(run, recorded.now + 7.0).trainer == "trains step 4 for 7.0 s"
    with snapshot(run.path / FILE) as connection:
        (first,), *_, (last,) = connection.execute("SELECT trained_at FROM batches WHERE trained_at > 0 ORDER BY step")
    assert left == pytest.approx((last - first) / 2 * 37)


def test_a_look_costs_the_same_for_a_run_of_any_length(
    run: RunDirectory, recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured as the number of SQLite's virtual machine instructions, which is the same every time."""

    def cost() -> int:
        count = 0

        def tick() -> int:
            nonlocal count
            count += 1
            return 0

        @contextmanager
        def counting(path: Path) -> Iterator[sqlite3.Connection]:
            with reading(path) as opened:
                opened.set_progress_handler(tick, 10)
                yield opened

        with monkeypatch.context() as patched:
            patched.setattr("asyncrl_cli.journal.queries.reading", counting)
            look(run)
        return count

    monkeypatch.setattr("asyncrl_cli.inspect.dashboard.TREND_STEPS", trend_steps := 32)
    for _ in range(trend_steps - 3):
        recorded.step()
    short = cost()
    recorded.book.journal.close()
    # A hundred times as many groups and rollouts before them.
    journal = open_for_writing(run.path / FILE)
    journal.execute("UPDATE groups SET id = id + 1000000, crc = NULL")
    journal.execute("UPDATE rollouts SET group_id = group_id + 1000000, crc = NULL")
    journal.execute("UPDATE segments SET group_id = group_id + 1000000, key_crc = NULL")
    journal.execute("UPDATE batches SET step = step + 100000")
    journal.execute("UPDATE groups SET step = step + 100000 WHERE step IS NOT NULL")
    (groups,) = journal.execute("SELECT count(*) FROM groups").fetchone()
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {100 * groups})"
    journal.execute(
        f"{numbers} INSERT INTO groups (id, uid, prompt, fields, prompt_ids, version, state, step, admitted_at) "
        "SELECT i, 'p', '\"\"', '{}', x'', 0, 'taken', i / 2, 0 FROM n"
    )
    journal.execute(
        f"{numbers} INSERT INTO rollouts (group_id, rollout_index, tokens, finish_reason, reward, recorded_at) "
        "SELECT i, 0, 4, 'stop', 1, 0 FROM n"
    )
    journal.execute(f"{numbers} INSERT INTO batches SELECT i, i, 0, 0, 0, '', '{{}}' FROM n WHERE i < {50 * groups}")
    journal.close()
    assert cost() <= 1.2 * short


# -- the command


def test_without_a_terminal_one_look_is_printed(run: RunDirectory, recorded: RecordedRun) -> None:
    command = [str(Path(sys.executable).with_name("asyncrl")), "watch", f"{run.path}/"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "3 of 40, weight version 3" in out and "\x1b" not in out


def test_terminal_shows_the_panel_until_ctrl_c(run: RunDirectory, recorded: RecordedRun) -> None:
    recorded.book.journal.close()
    ours, theirs = pty.openpty()
    command = [str(Path(sys.executable).with_name("asyncrl")), "watch", f"{run.path}/"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    printed = b""
    try:
        while b"weight version 3" not in printed:
            printed += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
