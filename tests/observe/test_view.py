"""What a person sees: sparklines, one line per step, and a panel that fits."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import sys

import pytest
from rich.console import Console
from rich.live import Live

from asyncrl_cli.buffer.ledger import Counts
from asyncrl_cli.observe.dashboard import BARS, LABEL_WIDTH, TREND_STEPS
from asyncrl_cli.observe.records import EvaluationKind, EvaluationResult
from asyncrl_cli.observe.view import LiveView, PlainView, open_view, step_line

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
LONG = "waiting: waits for groups that would miss their deadline: " + ", ".join(map(str, range(60)))


def evaluated(kind: EvaluationKind, step: int, accuracy: float) -> EvaluationResult:
    return EvaluationResult(kind, step, accuracy, accuracy, 87.5, 512, 0, step)


# -- lines


def test_a_step_in_one_line() -> None:
    assert step_line(7, 100, METRICS, {"greedy": 0.25, "sampled": 0.2}) == (
        "step 7/100  reward 0.512  held-out 0.250  length 88.1  staleness 0.5 max 1  12,345 tok/s"
        "  busy: trainer 90%, engines 75%  groups: 31 running, 3 finished"
    )
    assert "held-out" not in step_line(7, 100, METRICS, {"sampled": 0.2})


def test_the_plain_view_prints_a_line_per_event(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView(100)
    for done in range(3):
        view.status(f"warm start: {done} of 1000 updates")
    view.status("starting engines")
    view.doing(LONG, COUNTS)
    view.warn("engine-0: the process died")
    view.evaluated(evaluated("greedy", 0, 0.125))
    view.stepped(1, 1, METRICS)
    lines = capsys.readouterr().out.splitlines()
    times = [re.match(r" *\d+\.\d s  ", line) for line in lines]
    assert all(times)
    assert [line[match.end() :] for line, match in zip(lines, times, strict=True) if match] == [
        "warm start",
        "starting engines",
        "! engine-0: the process died",
        "held-out greedy accuracy 0.125 at step 0 (512 prompts, 87.5 tokens)",
        step_line(1, 100, METRICS, {"greedy": 0.125}),
    ]


# -- the panel


def panel(width: int, steps: int) -> list[str]:
    """The lines of the panel after so many steps, each with two evaluations, on a terminal of this width."""
    console = Console(file=io.StringIO(), width=width, record=True, force_terminal=True)
    live = Live(console=console, auto_refresh=False)
    view = LiveView(live, 1000, 4)
    view.status("[/starting] engines")
    for step in range(1, steps + 1):
        view.doing(LONG, COUNTS)
        view.stepped(step, step, METRICS | {"reward/mean": step / steps})
        for kind in ("greedy", "sampled"):
            view.evaluated(evaluated(kind, step, step / steps))  # type: ignore[arg-type]
    console.print(live.get_renderable())
    return [line.rstrip() for line in console.export_text().splitlines()]


LABELS = [
    "now",
    "step",
    "reward",
    "held-out, greedy",
    "held-out, sampled",
    "response",
    "loss",
    "staleness",
    "log-prob gap",
]
LABELS += ["generated", "trainer", "engines", "groups"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_panel_is_one_line_per_row_with_its_label(width: int) -> None:
    lines = panel(width, steps=TREND_STEPS + 20)
    assert all(len(line) <= width for line in lines)
    labels = [re.split(r"  +", line)[0] for line in lines]
    assert [label for label in labels if label] == LABELS
    assert len(lines) == len(LABELS) + 1, "and the progress bar"
    text = "\n".join(lines)
    assert re.search(r"^step +52 of 1000, weight version 52", text, re.MULTILINE)
    assert re.search(rf"^staleness +mean 0.50, max 1 of 4 versions  {BARS[0]}", text, re.MULTILINE)
    assert re.search(rf"^reward +1\.000  [{BARS}]{{{TREND_STEPS}}}$", text, re.MULTILINE)
    if width >= 80:
        assert re.search(
            rf"^held-out, sampled +1\.000  [{BARS}]{{{TREND_STEPS}}}  \(first 0\.019\)$", text, re.MULTILINE
        )


def test_before_the_first_step_the_panel_says_what_goes_on() -> None:
    lines = panel(60, steps=0)
    assert [line.split("  ")[0] for line in lines] == ["now"]
    assert lines[0].endswith("  [/starting] engines"), "text, and no markup"
    assert lines[0].index("[") == LABEL_WIDTH + 2, "where it stays when the longer labels come"


def test_warnings_stay_above_the_panel() -> None:
    console = Console(file=io.StringIO(), width=60, record=True, force_terminal=True)
    view = LiveView(Live(console=console, auto_refresh=False), 10, 1)
    view.warn("engine-0: [the process] died")
    assert console.export_text() == "! engine-0: [the process] died\n", "text, and no markup"


# -- which of them


def test_a_pipe_gets_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with open_view(10, 1) as view:
        assert isinstance(view, PlainView)
        view.stepped(3, 3, METRICS)
    assert "step 3/10" in capsys.readouterr().out


def test_a_terminal_gets_the_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        with open_view(10, 1) as view:
            assert isinstance(view, LiveView)
            view.status("starting engines")
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert b"starting engines" in shown
