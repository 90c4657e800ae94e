"""The output for users: sparklines, one line per step, and a panel that fits the terminal."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event, current_thread
from typing import cast

import pytest
from rich.console import Console

from asyncrl_cli.inspect.dashboard import BARS, LABEL_WIDTH, Panel, RunView, look
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.monitors.base import EvaluationKind, EvaluationResult
from asyncrl_cli.monitors.console import LiveView, PlainView, open_view, step_line
from asyncrl_cli.monitors.outlet import Outlet, Terminal, run_terminal
from asyncrl_cli.records.groups import Counts
from asyncrl_cli.runs.directory import RunDirectory
from tests.journal import recorded_run
from tests.journal.recorded_run import RecordedRun, make_run, settings

pytestmark = pytest.mark.slow

METRICS = {
    "reward/mean": 0.5125,
    "response/tokens_mean": 88.14,
    "staleness/groups_mean": 0.5,
    "staleness/groups_max": 1.0,
    "train/loss": -0.25,
    "correction/logprob_gap_mean": 0.00321,
    "tokens/generated_per_s": 12345.4,
    "share/trainer_busy": 0.9,
    "share/engines_busy": 0.75,
    "buffer/groups_running": 31.0,
    "buffer/groups_finished": 3.0,
}
COUNTS = Counts(running=31, finished=3, taken=1000, rejected=5, requeued=6, late=0)
LONG = "waiting: groups that would miss their deadline have not finished: " + ", ".join(map(str, range(60)))


def evaluated(kind: EvaluationKind, step: int, accuracy: float) -> EvaluationResult:
    return EvaluationResult(kind, step, accuracy, accuracy, 87.5, 512, 0, step)


# -- lines


def test_a_step_is_shown_in_one_line() -> None:
    spec = {"pipeline": {"groups_per_step": 32}, "rollout": {"max_response_tokens": 192}}
    accuracy = {"greedy": 0.25, "sampled": 0.2}
    assert step_line(7, 100, METRICS, accuracy, spec) == (
        "step 7/100  reward 0.512  held-out 0.250  length 88.1  staleness 0.5 max 1  12,345 tok/s"
        "  busy: trainer 90%, engines 75%  groups: 31 running, 3 finished"
    )
    assert "held-out" not in step_line(7, 100, METRICS, {"sampled": 0.2}, spec)
    assert "12,345 tok/s  MFU 38%  busy" in step_line(7, 100, METRICS | {"mfu/end_to_end": 0.375}, {}, spec)
    share = {"reward/uniform_groups": 0.625}
    assert "reward 0.512  teach 12/32  held-out 0.250" in step_line(7, 100, METRICS | share, accuracy, spec)
    without_groups = spec | {"algorithm": {"advantage": "gae", "uniform_groups": "train"}}
    assert "teach" not in step_line(7, 100, METRICS | share, {}, without_groups), "equal rewards teach, too"


def test_the_plain_view_prints_a_line_per_event() -> None:
    out = io.StringIO()
    view = PlainView(100, out)
    view.status("stopping: saving a checkpoint if there is time")
    for _ in range(2):
        view.status("starting engines")
    view.status(LONG, COUNTS)
    view.warn("engine-0: the process died")
    view.evaluated(evaluated("greedy", 0, 0.125))
    view.stepped(1, 1, METRICS)
    lines = out.getvalue().splitlines()
    times = [re.match(r" *\d+\.\d s  ", line) for line in lines]
    assert all(times)
    assert [line[match.end() :] for line, match in zip(lines, times, strict=True) if match] == [
        "stopping: saving a checkpoint if there is time",
        "starting engines",
        "! engine-0: the process died",
        "held-out greedy accuracy 0.125 at step 0 (512 prompts, 87.5 tokens)",
        step_line(1, 100, METRICS, {"greedy": 0.125}, {}),
    ]


# -- the panel


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path, phase="running")


@pytest.fixture
def recorded(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    """A run after 40 of 1,000 steps, with running and finished groups."""
    monkeypatch.setattr(recorded_run, "METRICS", recorded_run.METRICS | METRICS)
    of = settings(max_staleness=4, total_steps=1000)
    recorded = RecordedRun(run.path / FILE, monkeypatch, of, lambda g: 3.0 + 4 * (g % 3), concurrency=4)
    for _ in range(40):
        recorded.step()
    for kind in ("greedy", "sampled"):
        for step in (0, 40):
            recorded.book.journal.evaluated(asdict(evaluated(kind, step, (step + 1) / 100)))
    recorded.book.journal.failed("engine", "engine-0", "the process died")
    recorded.commit()
    return recorded


class Screen:
    """An outlet that stores its frames."""

    def __init__(self, width: int) -> None:
        self.size = (width, 60)
        self.drawn: list[tuple[str, int]] = []

    def draw(self, text: str, line_count: int = 0) -> None:
        self.drawn.append((re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text), line_count))


def live_view(run: RunDirectory, width: int) -> tuple[LiveView, Callable[[], list[str]]]:
    """A view, and a function that returns the lines of its frames on a terminal with this width."""
    screen = Screen(width)
    view = LiveView(cast("Outlet", screen), run)

    def lines() -> list[str]:
        view._look_and_draw()
        return [line.rstrip() for line in screen.drawn[-1][0].splitlines()]

    return view, lines


LABELS = [
    *("now", "step", "reward", "held-out, greedy", "held-out, sampled", "response", "loss", "log-prob gap"),
    *("staleness", "generated", "trainer", "engines", "groups", "to be trained", "last faults"),
]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_panel_shows_the_run_and_the_activity_of_the_loop(
    run: RunDirectory, recorded: RecordedRun, width: int
) -> None:
    view, lines = live_view(run, width)
    view.status(LONG, COUNTS)
    shown = lines()
    assert all(len(line) <= width for line in shown)
    assert [label for line in shown if (label := re.split(r"  +", line)[0])] == LABELS
    assert shown[0].startswith("now" + " " * (LABEL_WIDTH - 1) + "waiting: groups that would"), "the present values"
    text = "\n".join(shown)
    assert re.search(r"^step +40 of 1000, weight version 40", text, re.MULTILINE)
    assert re.search(rf"^reward +0\.51\d +[{BARS}]+$", text, re.MULTILINE)
    assert re.search(r"^to be trained +by version 4\d  ", text, re.MULTILINE)
    assert re.search(r"^last faults +\S+ \S+ engine-0: the p", text, re.MULTILINE)
    console = Console(file=io.StringIO(), width=width, height=60, record=True, force_terminal=True)
    console.print(Panel(replace(look(run), activity=LONG)))
    assert shown == [line.rstrip() for line in console.export_text().splitlines()]


def test_the_time_left_does_not_count_the_time_without_a_driver(run: RunDirectory, recorded: RecordedRun) -> None:
    run.lock()
    before_s = look(run).remaining_s
    recorded.crash(36_000.0)
    recorded.step()
    recorded.commit()
    assert look(run).remaining_s == pytest.approx(before_s, rel=0.1)


def test_an_error_while_looking_does_not_end_the_run(
    run: RunDirectory, recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, lines = live_view(run, 80)
    before = lines()

    def broken(_: RunDirectory) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("asyncrl_cli.monitors.console.look", broken)
    assert lines() == before


def test_the_view_looks_repeatedly_and_once_at_the_end(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    third = Event()

    def counting(_: RunDirectory) -> RunView:
        threads.append(current_thread().name)
        if len(threads) == 3:
            third.set()
        return RunView("")

    monkeypatch.setattr("asyncrl_cli.monitors.console.look", counting)
    monkeypatch.setattr("asyncrl_cli.monitors.console.REFRESH_S", 0.01)
    view, _ = live_view(run, 80)
    with view:
        assert third.wait(120)
    assert set(threads[:3]) == {"live-view"}, "the loop does not wait for it"
    assert threads[-1] == current_thread().name


def test_warnings_stay_above_the_panel_and_count_as_lines(run: RunDirectory) -> None:
    screen = Screen(60)
    view = LiveView(cast("Outlet", screen), run)
    view.warn("engine-0: [the process] died")
    [(frame, line_count)] = screen.drawn
    assert frame.startswith("! engine-0: [the process] died\nnow "), "as text, not as markup"
    assert line_count == 1


# -- which view is chosen


def test_a_pipe_gets_lines(run: RunDirectory, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with run_terminal(tmp_path) as terminal, open_view(run, 10, terminal) as view:
        assert isinstance(view, PlainView)
        view.stepped(3, 3, METRICS)
    assert "step 3/10" in capfd.readouterr().out


def test_a_terminal_gets_the_panel(run: RunDirectory, recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(Outlet(theirs), Outlet(theirs))
    with open_view(run, 1000, terminal) as view:
        assert isinstance(view, LiveView)
        view.status("starting engines")
        view.warn("engine-0: gone")
    assert terminal.out.close() and terminal.err.close()
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # a closed terminal
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert b"starting engines" in shown and b"to be trained" in shown and b"! engine-0: gone" in shown
    assert b"\x1b[?25l" not in shown, "a kill would leave the cursor hidden"
