"""The estimate of another bound: against runs whose waiting is known, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from asyncrl_cli.inspect.what_if import (
    ENGINES,
    Attempt,
    Step,
    Workload,
    newest,
    simulate,
    times_relative,
    workload,
)
from asyncrl_cli.journal import queries
from asyncrl_cli.journal.step_timeline import BatchTimes, GroupTimes, Recording, recording
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
    assert (outcome.mean_staleness, outcome.most_staleness) == (0, 0)


def test_by_hand_with_overlap() -> None:
    # Bound 1: four groups start at once, so the second batch is ready when the first is trained.
    outcome = simulate(work([2, 6, 3, 1], 2, 8), 1)
    assert (outcome.waited_s, outcome.seconds) == (2, 2 + 5 + 5)
    assert (outcome.mean_staleness, outcome.most_staleness) == (0.5, 1)


def test_concurrency_bounds_what_runs() -> None:
    outcome = simulate(work([2, 6, 3, 1], 2, 1), 1)
    assert outcome.waited_s == 8 + 0
    assert simulate(work([2, 6, 3, 1], 2, 2), 1).waited_s == 5


def test_groups_that_took_no_time_are_simulated() -> None:
    groups = [GroupTimes(1.0, 1.0, rejected=False)] * 2
    record = Recording(settings(total_steps=1), groups, [BatchTimes(1.0, 2.0)])
    assert simulate(workload(record), 1).waited_s == 0


def test_rejected_groups_cost_time() -> None:
    these = [Attempt(2.0), Attempt(3.0, rejected=True), Attempt(4.0)]
    outcome = simulate(Workload(settings(), these, [Step(4.0)], 2, 0.0, 0.0), 0)
    assert outcome.waited_s == 3 + 4


def test_other_policies() -> None:
    long = [100.0, *[2.0] * 99]
    wait, requeue, train = (simulate(work(long, 21, 8, on_stale=policy), 1) for policy in ("wait", "requeue", "train"))
    assert wait.waited_s > 80
    assert max(requeue.waited_s, train.waited_s) < 40
    assert (wait.most_staleness, requeue.most_staleness) == (1, 1)
    assert train.most_staleness > 10


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
    assert outcome.most_staleness <= what_if
    assert outcome.waited_s + sum(step.train_s for step in these.steps) + 3 * 1.0 == pytest.approx(outcome.seconds)


# -- engines without capacity to spare


def test_saturated_engines_are_shared_by_the_groups_that_run() -> None:
    # Two groups at once, 3 s and 5 s of the engines' work: the first ends after 6 s, the other 2 s later.
    these = [Attempt(1.0, work_s=3.0), Attempt(1.0, work_s=5.0)]
    outcome = simulate(Workload(settings(), these, [Step(4.0)], 2, 0.0, 0.0), 0, "saturated")
    assert (outcome.waited_s, outcome.seconds) == (8, 12)


def test_the_work_of_a_group_is_its_part_of_the_engines_time() -> None:
    groups = [GroupTimes(0.0, 6.0, rejected=False), GroupTimes(0.0, 8.0, rejected=False), GroupTimes(20, 21, False)]
    these = workload(Recording(settings(), groups, [BatchTimes(8.0, 12.0)]))
    assert [attempt.work_s for attempt in these.attempts] == [3, 5, 1]


@given(
    durations=st.lists(st.floats(0.5, 30), min_size=2, max_size=30),
    bound=st.integers(0, 4),
    concurrency=st.integers(1, 12),
)
@examples(max_examples=100, deadline=None)
def test_saturated_engines_never_do_more_than_one_second_of_work_in_a_second(
    durations: list[float], bound: int, concurrency: int
) -> None:
    these = work([], 4, concurrency, max_staleness=bound)
    these = replace(these, attempts=[Attempt(each, work_s=each) for each in durations])
    outcome = simulate(these, bound, "saturated")
    trained = sum(durations[at % len(durations)] for at in range(2 * len(these.steps)))
    if bound == 0:  # the groups that were trained are then those that were begun first
        assert outcome.seconds >= trained - 1e-6
    assert outcome.most_staleness <= bound


def test_times_relative_to_the_own_bound_enclose_both_assumptions() -> None:
    these = replace(work([], 12, 8), attempts=[Attempt(g % 5 + 1.0, work_s=(g % 5 + 1) / 4) for g in range(24)])
    low, high = times_relative(these, [1, 3])[3]
    both = [simulate(these, 3, engines).seconds / simulate(these, 1, engines).seconds for engines in ENGINES]
    assert (low, high) == (min(both), max(both))
    assert times_relative(these, [1])[1] == (1, 1)


def test_the_newest_steps_of_a_long_run() -> None:
    groups = [GroupTimes(float(at), at + 3.0, rejected=False) for at in range(40)]
    batches = [BatchTimes(2.0 * at + 4, 2.0 * at + 5) for at in range(20)]
    record = Recording(settings(), groups, batches)
    assert newest(record, 1000) is record
    cut = newest(record, 10)
    assert list(cut.batches) == batches[-5:]
    assert cut.settings.total_steps == 5
    assert cut.groups[0].admitted_at >= batches[-6].taken_at
    assert workload(cut).seconds == batches[-1].trained_at - cut.groups[0].admitted_at


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
def test_the_recorded_bound_waits_as_long_as_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float], bound: int, every: int
) -> None:
    of = settings(max_staleness=bound, publish_every=every, total_steps=12)
    run = RecordedRun(tmp_path / "journal.db", monkeypatch, of, seconds, concurrency=6)
    for _ in range(12):
        run.step()
    these = recorded(tmp_path / "journal.db")
    assert these.waited_s == pytest.approx(sum(run.waited), abs=1e-3)
    assert simulate(these, bound).waited_s == pytest.approx(sum(run.waited), abs=1e-3)
    assert simulate(these, bound, "saturated").waited_s == pytest.approx(sum(run.waited), abs=1e-3)


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


def test_a_running_run_is_estimated_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecordedRun(tmp_path / "journal.db", monkeypatch, settings(), DURATIONS[0], concurrency=6)
    for _ in range(5):
        run.step()
    run.take()
    these = recorded(tmp_path / "journal.db")
    assert len(these.steps) == 5
    assert simulate(these, 1).waited_s == pytest.approx(sum(run.waited), abs=1e-3)


def test_time_in_which_the_run_was_dead_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_publishing_and_saving_are_not_waiting() -> None:
    groups = [GroupTimes(0.0, 10.0, rejected=False)] * 4
    batches = [
        BatchTimes(10.0, 15.5, published_at=15.0, publish_s=1.0, save_s=2.0),  # recorded after its publish
        BatchTimes(20.0, 24.0, published_at=26.0, publish_s=1.5),  # recorded before
        BatchTimes(26.0, 30.0),
    ]
    these = workload(Recording(settings(), groups, batches))
    assert these.steps == [Step(4.0, 1.0, 0.5 + 2.0), Step(4.0, 1.5), Step(4.0)]
    assert these.waited_s == 10.0 + (20.0 - 15.5 - 2.0) + (26.0 - 25.5)
    assert these.seconds == 30.0
    assert these.concurrency == 4


def test_only_the_trainers_part_of_a_publish_keeps_it() -> None:
    groups = [GroupTimes(0.0, 10.0, rejected=False)] * 4
    batches = [
        BatchTimes(10.0, 15.0, published_at=18.0, publish_s=3.5, held_s=0.5),
        BatchTimes(16.0, 20.0, published_at=20.0, publish_s=0.5, held_s=0.5),
    ]
    these = workload(Recording(settings(), groups, batches))
    assert these.steps == [Step(4.5, 0.5, deliver_s=3.0), Step(3.5, 0.5)]
    assert these.waited_s == 10.0 + (16.0 - 15.0)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_engines_load_beside_the_next_step_where_there_is_staleness(bound: int) -> None:
    steps = [Step(4.0, 1.0, deliver_s=2.0)] * 10
    # Groups of no length: the trainer waits for nothing but publishes.
    quick = Workload(settings(max_staleness=bound, total_steps=10), [Attempt(0.0)], steps, 4, 0.0, 0.0)
    outcome = simulate(quick, bound)
    assert outcome.waited_s == (0.0 if bound else pytest.approx(9 * 2.0))
    assert outcome.seconds == pytest.approx(10 * 5.0 + 2.0 + outcome.waited_s)


def test_one_publish_at_a_time() -> None:
    steps = [Step(1.0, 1.0, deliver_s=10.0)] * 10
    quick = Workload(settings(max_staleness=8, total_steps=10), [Attempt(0.0)], steps, 4, 0.0, 0.0)
    assert simulate(quick, 8).seconds == pytest.approx(1.0 + 10 * (1.0 + 10.0))


def test_a_group_that_runs_lasts_as_the_median_or_longer() -> None:
    ended = [GroupTimes(float(at), at + 6.0, rejected=False) for at in range(3)]
    running = [GroupTimes(1.0, None, rejected=False), GroupTimes(19.0, None, rejected=False)]
    these = workload(Recording(settings(), [*ended, *running], [BatchTimes(8.0, 20.0)]))
    assert [attempt.seconds for attempt in these.attempts] == [6, 6, 6, 19, 6]
    assert these.concurrency == 4


def test_without_a_trained_step_there_is_no_estimate() -> None:
    with pytest.raises(ValueError, match="no step is trained"):
        workload(Recording(settings(), [GroupTimes(0.0, None, rejected=False)], []))
