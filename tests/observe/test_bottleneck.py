"""What held a run back: the pure rule, and made runs of which it is known."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.buffer.queries import snapshot
from asyncrl_cli.buffer.schema import FILE
from asyncrl_cli.buffer.spans import step_spans
from asyncrl_cli.observe.report.bottleneck import PARTS, Activity, Part, bottleneck, split_wait
from asyncrl_cli.observe.report.summary import summarize
from asyncrl_cli.observe.report.trainer_time import activity, trainer_time
from tests.buffer.recorded_run import STARTED, RecordedRun, settings
from tests.observe.made_runs import SITUATIONS, made_run

TIMES = st.floats(0, 1000, allow_nan=False).map(lambda value: round(value, 3))
SHARE = st.none() | st.floats(0, 1)


@st.composite
def activities(draw: st.DrawFn) -> Activity:
    weights = draw(st.lists(st.floats(0, 1), min_size=len(PARTS), max_size=len(PARTS)).filter(lambda w: sum(w) > 0.01))
    trainer = {part: weight / sum(weights) for part, weight in zip(PARTS, weights, strict=True)}
    return Activity(trainer, draw(SHARE), draw(SHARE), draw(SHARE))


@given(activities(), st.integers(0, 8))
def test_the_largest_part_is_named_with_its_share(spent: Activity, bound: int) -> None:
    found = bottleneck(spent, bound)
    assert found.share == max(spent.trainer.values()) == spent.trainer[found.part]
    assert f"{found.share:.0%}" in found.sentence
    assert found.advice.endswith(".")


@given(activities(), st.sampled_from(PARTS), st.floats(0, 1))
def test_a_part_that_takes_more_stays_the_bottleneck(spent: Activity, more: Part, by: float) -> None:
    grown = {part: (share + (by if part == more else 0.0)) / (1 + by) for part, share in spent.trainer.items()}
    before = bottleneck(spent, 1).part
    after = bottleneck(Activity(grown, spent.engines_busy, None, None), 1).part
    assert after in (before, more)
    if before == more:
        assert after == more


@given(TIMES, TIMES, TIMES, TIMES, TIMES)
def test_a_wait_is_cut_without_a_rest(
    asked: float, taken: float, generated: float, scored: float, saving: float
) -> None:
    cut = split_wait(asked, taken, generated, scored, saving)
    assert min(cut.values()) >= 0
    assert sum(cut.values()) == pytest.approx(max(0.0, taken - asked))


@pytest.mark.parametrize(
    ("times", "cut"),
    [
        ((0, 10, 4, 7, 1), {"generation": 4, "reward": 3, "saving": 1, "between": 2}),
        ((5, 10, 4, 7, 0), {"generation": 0, "reward": 2, "saving": 0, "between": 3}),
        ((8, 10, 4, 7, 9), {"generation": 0, "reward": 0, "saving": 2, "between": 0}),
        ((0, 10, 10, 10, 0), {"generation": 10, "reward": 0, "saving": 0, "between": 0}),
    ],
)
def test_waits(times: tuple[float, ...], cut: dict[Part, float]) -> None:
    assert split_wait(*times) == cut


def test_the_second_is_told_when_it_is_large() -> None:
    def sentence(second: float) -> str:
        shares = dict.fromkeys(PARTS, 0.0) | {"generation": 1 - second, "reward": second}
        return bottleneck(Activity(shares, None, None, None), 1).sentence

    assert sentence(0.45).endswith("55% of the time. Next came waiting for scores, with 45%.")
    assert sentence(0.1).endswith("90% of the time.")


def test_the_advice_goes_by_what_engines_and_disk_did() -> None:
    def advice(part: Part, bound: int = 2, **others: float | None) -> str:
        shares = {"engines_busy": None, "engines_paused": None, "journal_busy": None} | others
        return bottleneck(Activity(dict.fromkeys(PARTS, 0.0) | {part: 1.0}, **shares), bound).advice

    assert "rollout.engines" in advice("generation", engines_busy=0.9)
    assert "task.episode.workers" in advice("generation", engines_busy=0.1)
    assert "mode async" in advice("generation", bound=0, engines_busy=0.1)
    assert "mode async" in advice("training", bound=0)
    assert "mode async" not in advice("training") + advice("reward", bound=0)
    assert "disk" in advice("between", journal_busy=0.9)
    assert "evaluation.every" in advice("between", journal_busy=0.1)


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_bottleneck_of_a_made_run_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    situation = SITUATIONS[name]
    run = made_run(tmp_path, monkeypatch, situation)
    found = summarize(run).bottleneck
    assert found is not None
    assert (found.part, found.share > 0.5) == (situation.bottleneck, True)


def test_the_trainers_time_is_the_runs_without_what_it_was_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(tmp_path / FILE, monkeypatch, settings(max_staleness=2), lambda g: 3.0 + 4 * (g % 3), 4)
    for _ in range(4):
        run.step()
    crashed = run.now
    run.crash(1000.0)
    for _ in range(4):
        run.step()
    with snapshot(tmp_path / FILE) as connection:
        spans = list(step_spans(connection, 1))
        times = trainer_time(connection, spans)
    spent = [sum(time.seconds.values()) for time in times]
    assert sum(spent[:4]) == pytest.approx(crashed - STARTED)
    assert sum(spent[4:]) == pytest.approx(run.now - spans[4].taken_at)
    assert sum(time.seconds["generation"] for time in times[:4]) == pytest.approx(sum(run.waited[:4]))
    found = activity(times, {})
    assert found is not None and sum(found.trainer.values()) == pytest.approx(1.0)
    assert activity([], {}) is None
