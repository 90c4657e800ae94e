"""The estimate of another bound: against runs whose waiting is known, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from asyncrl_cli.buffer import queries
from asyncrl_cli.buffer.history import recording
from asyncrl_cli.buffer.what_if import (
    Attempt,
    BatchTimes,
    GroupTimes,
    Recording,
    Step,
    Workload,
    simulate,
    workload,
)
from tests.buffer.recorded_run import RecordedRun, settings


def work(seconds: list[float], steps: int, concurrency: int, **changes: object) -> Workload:
    """Groups that last so long, in order, and steps of 4 + 1 seconds."""
    return Workload(
        settings(**changes), [Attempt(each) for each in seconds], [Step(4.0, 1.0)] * steps, concurrency, 0.0, 0.0
    )


def test_by_hand_without_overlap() -> None:
    # Two groups a step, bound 0: each step waits for its slower group, then trains for 5 s.
    outcome = simulate(work([2, 6, 3, 1], 2, 8, max_staleness=0), 0)
    assert (outcome.waited_s, outcome.seconds) == (6 + 3, 6 + 5 + 3 + 5)
    assert (outcome.mean_lag, outcome.max_lag) == (0, 0)


def test_by_hand_with_overlap() -> None:
    # Bound 1: four groups start at once, so the second batch is ready when the first is trained.
    outcome = simulate(work([2, 6, 3, 1], 2, 8), 1)
    assert (outcome.waited_s, outcome.seconds) == (2, 2 + 5 + 5)
    assert (outcome.mean_lag, outcome.max_lag) == (0.5, 1)


def test_concurrency_bounds_what_runs() -> None:
    outcome = simulate(work([2, 6, 3, 1], 2, 1), 1)
    assert outcome.waited_s == 8 + 0
    assert simulate(work([2, 6, 3, 1], 2, 2), 1).waited_s == 5


def test_rejected_groups_are_generated_in_vain() -> None:
    these = [Attempt(2.0), Attempt(3.0, rejected=True), Attempt(4.0)]
    outcome = simulate(Workload(settings(), these, [Step(4.0)], 2, 0.0, 0.0), 0)
    assert outcome.waited_s == 3 + 4


def test_other_policies() -> None:
    long = [100.0, *[2.0] * 99]
    wait, requeue, train = (simulate(work(long, 21, 8, on_stale=policy), 1) for policy in ("wait", "requeue", "train"))
    assert wait.waited_s > 80
    assert max(requeue.waited_s, train.waited_s) < 40
    assert (wait.max_lag, requeue.max_lag) == (1, 1)
    assert train.max_lag > 10


@given(
    durations=st.lists(st.floats(0.5, 30), min_size=1, max_size=30),
    every=st.integers(1, 3),
    bound=st.integers(0, 3),
    what_if=st.integers(0, 3),
    concurrency=st.integers(1, 12),
)
@examples(max_examples=200, deadline=None)
def test_the_bound_holds_and_waiting_adds_up(
    durations: list[float], every: int, bound: int, what_if: int, concurrency: int
) -> None:
    these = work(durations, 3 * every, concurrency, publish_every=every, max_staleness=bound)
    outcome = simulate(these, what_if)
    assert outcome.max_lag <= what_if
    assert outcome.waited_s + sum(step.train_s for step in these.steps) + 3 * 1.0 == pytest.approx(outcome.seconds)


# -- against recorded runs


def recorded(path: Path) -> Workload:
    with queries.snapshot(path) as connection:
        return workload(recording(connection))


DURATIONS: tuple[Callable[[int], float], ...] = (
    lambda g: 3.0 + 4 * (g % 3),
    lambda g: 25.0 if g % 7 == 2 else 1.5 + g % 5,
    lambda g: 1.0 + (g * 37 % 11),
)


@pytest.mark.parametrize("seconds", DURATIONS)
@pytest.mark.parametrize(("bound", "every"), [(0, 1), (1, 1), (2, 1), (1, 2)])
def test_the_recorded_bound_waits_as_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float], bound: int, every: int
) -> None:
    of = settings(max_staleness=bound, publish_every=every, total_steps=12)
    run = RecordedRun(tmp_path / "journal.db", monkeypatch, of, seconds, concurrency=6)
    for _ in range(12):
        run.step()
    these = recorded(tmp_path / "journal.db")
    assert these.waited_s == pytest.approx(sum(run.waited), abs=1e-3)
    assert simulate(these, bound).waited_s == pytest.approx(sum(run.waited), abs=1e-3)


@pytest.mark.parametrize("seconds", DURATIONS)
def test_another_bound_waits_as_a_run_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]
) -> None:
    # Groups last as long as their index says, so the run with the other bound is the truth of the estimate. Both have
    # all their engines' places in use at some moment.
    runs = []
    for bound in (1, 3):
        of = settings(max_staleness=bound, total_steps=12)
        run = RecordedRun(tmp_path / f"{bound}.db", monkeypatch, of, seconds, concurrency=4)
        for _ in range(12):
            run.step()
        runs.append(run)
    these = recorded(tmp_path / "1.db")
    assert these.concurrency == 4
    assert simulate(these, 3).waited_s == pytest.approx(sum(runs[1].waited), abs=1e-3)
    assert sum(runs[1].waited) < sum(runs[0].waited)


def test_a_run_that_goes_on_is_estimated_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecordedRun(tmp_path / "journal.db", monkeypatch, settings(), DURATIONS[0], concurrency=6)
    for _ in range(5):
        run.step()
    run.take()
    these = recorded(tmp_path / "journal.db")
    assert len(these.steps) == 5
    assert simulate(these, 1).waited_s == pytest.approx(sum(run.waited), abs=1e-3)


def test_time_in_which_the_run_was_down_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecordedRun(tmp_path / "journal.db", monkeypatch, settings(), DURATIONS[0], concurrency=6)
    for _ in range(6):
        run.step()
    before = recorded(tmp_path / "journal.db")
    run.crash(10_000)
    for _ in range(6):
        run.step()
    after = recorded(tmp_path / "journal.db")
    assert after.seconds < 10 * before.seconds
    assert max(attempt.seconds for attempt in after.attempts) <= 11
    assert before.waited_s <= after.waited_s <= sum(run.waited) + 1e-3


# -- from times to durations


def test_publishing_and_saving_are_no_waiting() -> None:
    groups = [GroupTimes(0.0, 10.0, rejected=False)] * 4
    batches = [
        BatchTimes(10.0, 15.5, published_at=15.0, publish_s=1.0, save_s=2.0),  # told after its publish
        BatchTimes(20.0, 24.0, published_at=26.0, publish_s=1.5),  # told before
        BatchTimes(26.0, 30.0),
    ]
    these = workload(Recording(settings(), groups, batches))
    assert these.steps == [Step(4.0, 1.0, 0.5 + 2.0), Step(4.0, 1.5), Step(4.0)]
    assert these.waited_s == 10.0 + (20.0 - 15.5 - 2.0) + (26.0 - 25.5)
    assert these.seconds == 30.0
    assert these.concurrency == 4


def test_a_group_that_runs_lasts_as_the_median_or_longer() -> None:
    ended = [GroupTimes(float(at), at + 6.0, rejected=False) for at in range(3)]
    running = [GroupTimes(1.0, None, rejected=False), GroupTimes(19.0, None, rejected=False)]
    these = workload(Recording(settings(), [*ended, *running], [BatchTimes(8.0, 20.0)]))
    assert [attempt.seconds for attempt in these.attempts] == [6, 6, 6, 19, 6]
    assert these.concurrency == 4


def test_without_a_trained_step_there_is_nothing_to_go_by() -> None:
    with pytest.raises(ValueError, match="no step is trained"):
        workload(Recording(settings(), [GroupTimes(0.0, None, rejected=False)], []))
