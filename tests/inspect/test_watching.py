"""Watching a run from another process: the journal's data, at the same cost for a run of any length."""

from __future__ import annotations

import io
import os
import pty
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from rich.console import Console
from rich.style import Style
from rich.text import Text

from asyncrl_cli.inspect.dashboard import look
from asyncrl_cli.inspect.decoding import TokenShown
from asyncrl_cli.inspect.rollout_pager import REWARDS, Pager, _style, rollout_text
from asyncrl_cli.journal.queries import group_record, overview, snapshot
from asyncrl_cli.journal.rollouts import next_rollout
from asyncrl_cli.journal.schema import FILE, open_for_writing, reading
from asyncrl_cli.runs.directory import RunDirectory
from tests.journal import recorded_run
from tests.journal.recorded_run import METRICS, EpisodeRun, RecordedRun, make_run, settings

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
    pager = Pager(run)
    pager.turn(older=True)
    assert pager.page().plain == "no rollout has ended yet"


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
            pager = Pager(run)
            pager.turn(older=True)
            pager.turn(older=True)
            pager.page()
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


# -- rollouts, one by one


def test_paging_goes_through_every_ended_rollout(run: RunDirectory, recorded: RecordedRun) -> None:
    journal = open_for_writing(run.path / FILE)
    journal.execute("UPDATE rollouts SET finish_reason = NULL WHERE group_id = 3 AND rollout_index = 1")
    ended = [
        tuple(row) for row in journal.execute("SELECT group_id, rollout_index FROM rollouts WHERE finish_reason > ''")
    ]
    journal.close()
    with snapshot(run.path / FILE) as connection:
        seen, index = [], None
        while (index := next_rollout(connection, index, older=True)) is not None:
            seen.append(index)
        assert seen == sorted(ended, reverse=True)
        for older, newer in zip(seen[1:], seen, strict=False):
            assert next_rollout(connection, older, older=False) == newer
        assert next_rollout(connection, seen[0], older=False) is None


def test_a_filter_chooses_among_the_rollouts(run: RunDirectory, recorded: RecordedRun) -> None:
    pager = Pager(run)
    pager.next_filter()
    assert pager.filter == "right"
    with snapshot(run.path / FILE) as connection:
        rewards = {
            (group_id, index): reward
            for group_id, index, reward in connection.execute("SELECT group_id, rollout_index, reward FROM rollouts")
        }
        for rewards_of, reward in ((REWARDS["right"], 1.0), (REWARDS["wrong"], 0.0)):
            seen, index = [], None
            while (index := next_rollout(connection, index, True, rewards_of)) is not None:
                seen.append(index)
            assert seen == sorted((one for one, of in rewards.items() if of == reward), reverse=True)
    assert "reward 1" in pager.page().plain and "right rollouts only" in pager.page().plain
    assert "reference  7" in pager.page().plain
    for _ in range(30):
        pager.turn(older=True)
    assert "there is no further right rollout" in pager.page().plain
    pager.next_filter()
    assert pager.filter == "wrong" and "reward 0" in pager.page().plain


def test_tokens_differ_without_colours() -> None:
    token = TokenShown("a", -0.01, 4, 0)

    def shown(style: str) -> str:
        console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", no_color=True)
        console.print(Text("a", style=style))
        return console.file.getvalue()  # type: ignore[attr-defined]

    styles = [_style(replace(token, logprob=logprob)) for logprob in (-0.01, -0.2, -1.0, -5.0)]
    assert len({shown(style) for style in styles}) == 4


def test_a_page_has_the_rollout_in_colours(run: RunDirectory, recorded: RecordedRun) -> None:
    pager = Pager(run)
    assert "no rollout" in pager.page().plain
    pager.turn(older=True)
    page = pager.page()
    assert "question" in page.plain and "5 6 7 1" in page.plain and "reward 1" in page.plain
    for _ in range(3):
        pager.turn(older=False)
    assert pager.page().plain.splitlines()[0] == page.plain.splitlines()[0], "there is no newer rollout"


def test_colours_say_how_likely_a_token_was() -> None:
    token = TokenShown("a", -0.01, 4, 0)
    assert _style(token) == ""
    styles = [_style(replace(token, logprob=logprob)) for logprob in (-0.2, -1.0, -5.0, float("-inf"))]
    assert styles == ["italic yellow", "underline dark_orange", "bold underline red", "bold underline red"]
    not_sampled = _style(TokenShown("a", None, None, 0))
    assert not_sampled == "dim italic"
    for style in (*styles, not_sampled):
        Style.parse(style)


def test_the_context_of_an_episode_is_dim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = EpisodeRun(tmp_path / FILE, monkeypatch, settings(), lambda _: 3.0)
    run.step()
    with snapshot(tmp_path / FILE) as connection:
        text = rollout_text(group_record(connection, 0), (0, 1), None)
    assert [text.plain[span.start : span.end] for span in text.spans if span.style == "dim italic"] == [
        *("11 ", "12 ", "13 ", "14 ", "15 "),
    ]


# -- the command


def test_without_a_terminal_one_look_is_printed(run: RunDirectory, recorded: RecordedRun) -> None:
    command = [str(Path(sys.executable).with_name("asyncrl")), "watch", f"{run.path}/"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "3 of 40, weight version 3" in out and "\x1b" not in out


def test_keys_page_and_quit(run: RunDirectory, recorded: RecordedRun) -> None:
    recorded.book.journal.close()
    ours, theirs = pty.openpty()
    command = [str(Path(sys.executable).with_name("asyncrl")), "watch", f"{run.path}/"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    printed = b""

    def until(text: bytes) -> None:
        nonlocal printed
        while text not in printed:
            printed += os.read(ours, 65536)
        printed = b""

    try:
        until(b"weight version 3")
        for key, answer in (
            *((b"p", b"rollout "), (b"b", b"weight version 3"), (b"ppn", b"colours:")),
            *((b"f", b"right rollouts only"), (b"b", b"weight version 3")),
        ):
            os.write(ours, key)
            until(answer)
        os.write(ours, b"q")
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
