"""What limited the speed of a run: the rule itself, and simulated runs whose bottleneck is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.buffer.batches import Batch
from asyncrl_cli.buffer.ledger import Ledger
from asyncrl_cli.inspect.report.bottleneck import (
    FOR_BATCHES,
    OTHER_WAITS,
    PARTS,
    TRAINER_BOUND,
    Activity,
    Circumstances,
    Part,
    bottleneck,
    helpful,
    split_wait,
)
from asyncrl_cli.inspect.report.evidence import activity, circumstances, enough_finished, trainer_time
from asyncrl_cli.inspect.report.summary import summarize
from asyncrl_cli.journal.queries import snapshot
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.journal.step_timeline import step_spans
from asyncrl_cli.plan.prediction import predict
from asyncrl_cli.records.groups import BufferSettings
from tests.buffer.recorded_run import STARTED, RecordedRun, settings
from tests.inspect.made_runs import SITUATIONS, made_run
from tests.inspect.quickstart_run import quickstart_run
from tests.plan.scenarios import scenario

TIMES = st.floats(0, 1000, allow_nan=False).map(lambda value: round(value, 3))
SHARE = st.none() | st.floats(0, 1)
EPISODES = {"rollout": {"engines": 1, "max_running_rollouts": 64}, "evaluation": {"every": 10, "fix_version": True}}


def circumstance(**changes: Any) -> Circumstances:
    usual = {"spec": {}, "max_staleness": 2, "episodic": False, "steps": 100, "most_rollouts": 8}
    return Circumstances(**(usual | changes))


@st.composite
def activities(draw: st.DrawFn) -> Activity:
    weights = draw(st.lists(st.floats(0, 1), min_size=len(PARTS), max_size=len(PARTS)).filter(lambda w: sum(w) > 0.01))
    trainer = {part: weight / sum(weights) for part, weight in zip(PARTS, weights, strict=True)}
    return Activity(trainer, draw(SHARE), draw(SHARE), draw(SHARE))


@given(activities(), st.integers(0, 8))
def test_the_largest_wait_is_named_and_training_only_when_little_else_is_left(spent: Activity, bound: int) -> None:
    found = bottleneck(spent, circumstance(max_staleness=bound))
    assert found.share == spent.trainer[found.part]
    assert f"{found.share:.0%}" in found.sentence
    assert found.advice.endswith(".")
    if found.part == "training":
        assert spent.trainer["training"] + spent.trainer["publishing"] >= TRAINER_BOUND
    else:
        kinds = [FOR_BATCHES, *((part,) for part in OTHER_WAITS)]
        largest = max(sum(spent.trainer[part] for part in kind) for kind in kinds)
        (kind,) = [kind for kind in kinds if found.part in kind]
        assert sum(spent.trainer[part] for part in kind) == pytest.approx(largest)
        assert found.share == max(spent.trainer[part] for part in kind)


@given(activities(), st.sampled_from(FOR_BATCHES + OTHER_WAITS), st.floats(0, 1))
def test_a_wait_that_takes_more_stays_the_bottleneck(spent: Activity, more: Part, by: float) -> None:
    grown = {part: (share + (by if part == more else 0.0)) / (1 + by) for part, share in spent.trainer.items()}
    if bottleneck(spent, circumstance()).part == more:
        assert bottleneck(Activity(grown, None, None, None), circumstance()).part == more


@given(TIMES, TIMES, TIMES, TIMES, TIMES, TIMES)
def test_a_wait_is_cut_without_a_rest(
    asked: float, taken: float, enough: float, generated: float, scored: float, saving: float
) -> None:
    cut = split_wait(asked, taken, enough, generated, scored, saving)
    assert min(cut.values()) >= 0
    assert sum(cut.values()) == pytest.approx(max(0.0, taken - asked))


@pytest.mark.parametrize(
    ("times", "cut"),
    [
        ((0, 10, 3, 4, 7, 1), {"generation": 3, "due": 1, "reward": 3, "saving": 1, "between": 2}),
        ((5, 10, 4, 4, 7, 0), {"generation": 0, "due": 0, "reward": 2, "saving": 0, "between": 3}),
        ((8, 10, 4, 4, 7, 9), {"generation": 0, "due": 0, "reward": 0, "saving": 2, "between": 0}),
        ((0, 10, 2, 10, 10, 0), {"generation": 2, "due": 8, "reward": 0, "saving": 0, "between": 0}),
        ((0, 10, 12, 10, 10, 0), {"generation": 10, "due": 0, "reward": 0, "saving": 0, "between": 0}),
    ],
)
def test_waits(times: tuple[float, ...], cut: dict[Part, float]) -> None:
    assert split_wait(*times) == cut


@given(
    st.lists(st.integers(1, 40), min_size=30, max_size=30),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_waiting_for_due_groups_is_what_the_ledger_calls_missing(
    seconds: list[int], bound: int, every: int, per_step: int
) -> None:
    """Compared with the real ledger: from the time that ``enough_finished`` returns, only due groups are missing."""
    steps, now = 6, 0
    ledger = Ledger(BufferSettings(per_step, every, bound, "wait", steps, 1, False))
    ends: dict[int, int] = {}
    finished: list[tuple[int, int]] = []
    taken_by: dict[int, int] = {}
    enough: dict[int, int] = {}
    for step in range(steps):
        while True:
            while ledger.room():
                group_id = ledger.admit().group_id
                ends[group_id] = now + seconds[group_id % len(seconds)]
            if isinstance(found := ledger.next_batch(), Batch):
                enough.setdefault(step, now)
                break
            if found.kind == "missing":
                enough.setdefault(step, now)
            group_id = min(ends, key=lambda one: ends[one])
            now = max(now, ends.pop(group_id))
            ledger.finish(group_id)
            finished.append((now, group_id))
        ledger.take(found)
        taken_by |= dict.fromkeys(found.group_ids, step)
        now += 1
        if ledger.publish_due:
            ledger.publish()
    rows = [(float(at), taken_by.get(group_id)) for at, group_id in finished]
    reported = enough_finished(rows, list(range(steps)), per_step)
    asked = {step: max(at, reported[step]) for step, at in enough.items()}
    assert asked == enough


def test_the_advice_goes_by_what_engines_and_disk_did_and_fits_the_run() -> None:
    def advice(part: Part, spec: Any = EPISODES, others: Any = (), **changes: Any) -> str:
        shares = {"engines_busy": None, "engines_paused": None, "journal_busy": None} | dict(others)
        spent = Activity(dict.fromkeys(PARTS, 0.0) | {part: 1.0}, **shares)
        return bottleneck(spent, circumstance(spec=spec, **changes)).advice

    idle, busy = {"engines_busy": 0.1}, {"engines_busy": 0.9}
    assert "rollout.engines" in advice("generation", others=busy)
    assert "max_running_rollouts" not in advice("generation", others=busy)
    assert "max_running_rollouts" in advice("generation", others=busy, most_rollouts=64)
    assert "task.episode.workers" in advice("generation", others=idle, episodic=True)
    assert "episode" not in advice("generation", others=idle), "the run has no episodes"
    assert "take turns" in advice("generation", others=idle, max_staleness=0)
    assert "take turns" in advice("training", max_staleness=0)
    assert "take turns" not in advice("training") + advice("reward", max_staleness=0)
    assert "disk" in advice("between", others={"journal_busy": 0.9})
    assert "evaluation.every" in advice("between") and "evaluation.fix_version" in advice("between")
    assert "evaluation" not in advice("between", spec={})
    assert "weight_update" in advice("publishing", spec={})
    assert "weight_update" not in advice("publishing", spec={"pipeline": {"weight_update": "keep"}})


def test_the_estimate_of_a_larger_bound_is_quoted() -> None:
    shares = dict.fromkeys(PARTS, 0.0) | {"due": 0.3, "training": 0.7}

    own = predict(scenario(), 300, alone=True, steps=2)

    def advice(*others: tuple[int, float]) -> str:
        at = circumstance().max_staleness
        prediction = replace(own, bounds={at: 1.0} | dict(others)) if others else None
        return bottleneck(Activity(shares, None, None, None), circumstance(prediction=prediction)).advice

    text = advice((3, 0.9), (4, 0.71), (6, 0.7))
    assert text.startswith("With pipeline.max_staleness 4, a step would have taken 71% of its time.")
    assert "an estimate" in text and "--what-if 4" in text
    assert "would not have helped" in advice((3, 0.99), (6, 0.96))
    assert "max_staleness" not in advice()
    assert helpful(circumstance()) is None


def test_groups_that_were_generated_in_vain_are_mentioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = settings(max_staleness=1, on_stale="requeue")
    run = RecordedRun(tmp_path / FILE, monkeypatch, of, lambda g: 60.0 if g % 3 == 0 else 2.0, 4)
    for _ in range(12):
        run.step()
    with snapshot(tmp_path / FILE) as connection:
        known = circumstances(connection, {}, list(step_spans(connection, 1)), of)
    assert known is not None and known.requeued > 0.1 and known.rejected == 0
    spent = Activity(dict.fromkeys(PARTS, 0.0) | {"generation": 1.0}, None, None, None)
    assert f"{known.requeued:.2f} were cancelled" in bottleneck(spent, known).advice
    assert "0.50 were rejected" in bottleneck(spent, circumstance(rejected=0.5)).advice
    assert "rejected" not in bottleneck(spent, circumstance()).advice


def test_waiting_for_the_first_rollouts_is_not_a_bottleneck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose bottleneck is the trainer, and whose first rollouts take long."""
    run = RecordedRun(tmp_path / FILE, monkeypatch, settings(max_staleness=2), lambda g: 40.0 if g < 6 else 1.0, 8)
    for _ in range(20):
        run.step()
    with snapshot(tmp_path / FILE) as connection:
        times = trainer_time(connection, list(step_spans(connection, 1)), 2)
    spent, start = activity(times, {}), activity(times[:3], {})
    assert spent is not None and bottleneck(spent, circumstance()).part == "training"
    assert start is not None and bottleneck(start, circumstance()).part != "training"


def test_waits_for_batches_count_together() -> None:
    """The shares of a quickstart on a busy machine, in which publishing was the largest single wait."""
    shares = dict.fromkeys(PARTS, 0.0) | {"training": 0.57, "publishing": 0.13, "due": 0.12, "reward": 0.1}
    found = bottleneck(Activity(shares | {"generation": 0.08}, None, None, None), circumstance())
    assert found.part == "due"
    assert "waited for batches 30% of its time, and the largest part of that (12%)" in found.sentence


def test_a_short_run_is_mostly_its_start() -> None:
    spent = Activity(dict.fromkeys(PARTS, 0.0) | {"generation": 1.0}, None, None, None)
    assert "Only 3 step(s)" in bottleneck(spent, circumstance(steps=3)).sentence
    assert "Only" not in bottleneck(spent, circumstance(steps=10)).sentence


def test_the_quickstart_was_limited_by_its_bound(tmp_path: Path) -> None:
    """With the times of the first 40 steps of a real run of specs/quickstart.yaml."""
    run = quickstart_run(tmp_path)
    found = summarize(run).bottleneck
    assert found is not None
    assert found.part == "due"
    assert "The staleness bound limited the speed" in found.sentence
    assert "max_staleness" in found.advice and "episode" not in found.advice


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_bottleneck_of_a_made_run_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    situation = SITUATIONS[name]
    run = made_run(tmp_path, monkeypatch, situation)
    found = summarize(run).bottleneck
    assert found is not None
    assert (found.part, found.share > 0.4) == (situation.bottleneck, True)
    quoted = "would have taken" in found.advice
    assert quoted is (name == "tight bound"), "a larger bound helps only there"


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
        times = trainer_time(connection, spans, 2)
        known = circumstances(connection, {}, spans, settings(max_staleness=2))
    spent = [sum(time.seconds.values()) for time in times]
    assert sum(spent[:4]) == pytest.approx(crashed - STARTED)
    assert sum(spent[4:]) == pytest.approx(run.now - spans[4].taken_at)
    waited = sum(time.seconds["generation"] + time.seconds["due"] for time in times[:4])
    assert waited == pytest.approx(sum(run.waited[:4]))
    assert known is not None and known.steps == 8
    found = activity(times, {})
    assert found is not None and sum(found.trainer.values()) == pytest.approx(1.0)
    assert activity([], {}) is None
