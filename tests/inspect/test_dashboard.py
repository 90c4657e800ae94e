"""The panel: sparklines, the picture of the buffer, and only rows with known values."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from asyncrl_cli.inspect.dashboard import (
    BARS,
    DUE_ROWS,
    FAULTS,
    FINISHED,
    LABEL_WIDTH,
    METRIC_ROWS,
    PICTURE_WIDTH,
    RUNNING,
    TREND_STEPS,
    TRENDS,
    Panel,
    RunView,
    picture,
    sparkline,
)
from asyncrl_cli.journal.queries import Due
from asyncrl_cli.records.groups import Counts

METRICS = {
    "reward/mean": 0.5,
    "response/tokens_mean": 88.0,
    "staleness/groups_mean": 0.5,
    "staleness/groups_max": 1.0,
    "tokens/generated_per_s": 12345.4,
    "share/trainer_busy": 0.9,
    "share/engines_busy": 0.75,
}
DUE = [Due(version, 0, version + 2, running=3 * version, finished=version) for version in range(10)]
VIEW = RunView("[/now]", 5, 10, 5, 2, METRICS, counts=Counts(135, 45, 1000, 5, 6, 0), due=DUE)


def lines(shown: RunView, width: int = 80, height: int = 25) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, record=True)
    console.print(Panel(shown))
    return [line.rstrip() for line in console.export_text().splitlines()]


@given(st.lists(st.floats(width=64), max_size=50))
def test_sparkline_has_a_bar_per_value_in_their_order(values: list[float]) -> None:
    bars = sparkline(values)
    assert [bar == " " for bar in bars] == [not math.isfinite(value) for value in values]
    finite = [(value, bar) for value, bar in zip(values, bars, strict=True) if bar != " "]
    ordered = [BARS.index(bar) for _, bar in sorted(finite)]
    assert ordered == sorted(ordered)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2))
def test_sparkline_spans_the_bars(values: list[float]) -> None:
    bars = sparkline(values)
    assert bars[values.index(min(values))] == BARS[0]
    assert bars[values.index(max(values))] == BARS[-1 if max(values) > min(values) else 0]


# -- the buffer


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 40))
def test_the_picture_shows_any_group_at_all(finished: int, running: int, per_cell: int) -> None:
    drawn = picture(Due(0, 0, 2, running, finished), per_cell)
    assert re.fullmatch(f"{FINISHED}*{RUNNING}*", drawn)
    for cell, count in ((FINISHED, finished), (RUNNING, running)):
        assert drawn.count(cell) == math.ceil(count / per_cell)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_buffer_is_shown_by_deadline_and_fits(width: int) -> None:
    shown = lines(VIEW, width)
    assert all(len(line) <= width for line in shown)
    buffer = [line for line in shown if "by version" in line]
    assert len(buffer) == DUE_ROWS
    assert buffer[0].startswith("to be trained") and all(line.startswith(" ") for line in buffer[1:])
    cells = [line.count(FINISHED) + line.count(RUNNING) for line in buffer]
    assert max(cells[1:]) <= PICTURE_WIDTH + 1
    assert any("and 120 groups with later deadlines" in line for line in shown)
    assert any(f"{RUNNING} 135 running, {FINISHED} 45 finished" in line for line in shown)


# -- rows with known values


def test_before_the_first_step() -> None:
    assert lines(RunView("starting")) == ["now                starting"]
    begun = lines(replace(VIEW, metrics={}, due=[Due(0, 0, 2, 4, 0)]))
    assert [line[:6].strip() for line in begun] == ["now", "groups", "to be"]


def test_the_panel_shows_the_trainers_activity_and_the_remaining_time() -> None:
    text = "\n".join(lines(replace(VIEW, trainer="trains step 6 for 2.0 s", remaining_s=3725.0)))
    assert "busy 90%, trains step 6 for 2.0 s" in text and "weight version 5, 1 h 2 min left" in text
    assert "loss" not in text and "log-prob gap" not in text, "their values are not known"
    assert "weight version 5, 1 min 5 s left" in "\n".join(lines(replace(VIEW, remaining_s=65.4)))


def test_the_last_faults_are_a_line_each_and_text() -> None:
    shown = lines(replace(VIEW, faults=[f"fault {at} [/red]\nof several lines" for at in range(FAULTS + 2)]))
    assert [line[19:] for line in shown[-FAULTS:]] == [f"fault {at} [/red] of several lines" for at in (2, 3, 4)]
    assert shown[-FAULTS].startswith("last faults")


@pytest.mark.parametrize("missing", METRICS)
def test_a_metric_that_is_missing_costs_its_row_only(missing: str) -> None:
    complete = lines(VIEW)
    fewer = lines(replace(VIEW, metrics={name: value for name, value in METRICS.items() if name != missing}))
    assert len(fewer) == len(complete) - 1
    assert set(fewer) < set(complete)


@pytest.mark.parametrize(("width", "height"), [(60, 20), (80, 25), (160, 50), (250, 80)])
def test_trends_fill_a_wide_terminal_and_fit_a_narrow_one(width: int, height: int) -> None:
    trends = {name: [float(step % 7) for step in range(TREND_STEPS)] for name in TRENDS}
    metrics = METRICS | dict.fromkeys(METRIC_ROWS, 0.5)
    drawn = lines(replace(VIEW, metrics=metrics, trends=trends, due=DUE[:2]), width, height)
    assert max(map(len, drawn)) == width if width < TREND_STEPS else width - TREND_STEPS > 0
    assert len(drawn) < height
    labels = [line[:LABEL_WIDTH].strip() for line in drawn]
    assert all(label in labels for label, _ in METRIC_ROWS.values())


def test_findings_are_shown_above_the_metrics() -> None:
    drawn = lines(replace(VIEW, findings=["since step 3 [/x] all groups are equal " * 4, "second"]), height=40)
    first, second = (at for at, line in enumerate(drawn) if line.startswith("NOT HEALTHY") or line.endswith(" second"))
    assert " ".join(" ".join(drawn[first:second]).split()).count("all groups are equal") == 4, "the text wraps"
    assert drawn[second + 1].startswith("reward")
