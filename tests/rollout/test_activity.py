"""The activity times of an engine, with a simulated clock."""

from __future__ import annotations

import pytest

from asyncrl_cli.rollout.activity import ActivityClock


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def clock(time: Time) -> ActivityClock:
    return ActivityClock(time)


def test_silence_lasts_from_the_last_new_token(time: Time, clock: ActivityClock) -> None:
    time.now += 50
    clock.set_busy(True)
    silences = []
    for sampled, generating in ((0, True), (0, True), (7, True), (7, True), (7, False), (7, True), (8, True)):
        time.now += 5
        silences.append(clock.take_activity(sampled, generating).silent_s)
    assert silences == [5, 10, 0, 5, 0, 5, 0], "rollouts that wait for a version are not silent"


def test_an_idle_engine_is_not_silent_and_new_work_starts_over(time: Time, clock: ActivityClock) -> None:
    clock.set_busy(True)
    time.now += 5
    assert clock.take_activity(0).silent_s == 5
    clock.set_busy(False)
    time.now += 100
    assert clock.take_activity(0).silent_s == 0
    clock.set_busy(True)
    time.now += 2
    clock.set_busy(True)
    assert clock.take_activity(0).silent_s == 2


def test_an_update_is_not_silence(time: Time, clock: ActivityClock) -> None:
    clock.set_busy(True)
    clock.begin_update()
    time.now += 60
    assert clock.take_activity(0).silent_s == 0
    clock.end_update(60.0)
    time.now += 3
    activity = clock.take_activity(0)
    assert (activity.silent_s, activity.paused_s) == (3, 60)


def test_tokens_of_a_cancelled_rollout_do_not_end_silence(time: Time, clock: ActivityClock) -> None:
    clock.set_busy(True)
    clock.take_activity(500)
    time.now += 5
    assert clock.take_activity(400).silent_s == 5
    time.now += 5
    assert clock.take_activity(401).silent_s == 0


def test_sums_restart_with_each_report(time: Time, clock: ActivityClock) -> None:
    clock.set_busy(True)
    clock.add_ended(4)
    clock.add_ended(3)
    time.now += 2
    clock.set_busy(False)
    time.now += 1
    first, second = clock.take_activity(7), clock.take_activity(7)
    assert (first.generated_tokens, first.busy_s, first.wall_s) == (7, 2, 3)
    assert (second.generated_tokens, second.busy_s, second.wall_s) == (0, 0, 0)


def test_a_pause_counts_only_what_rollouts_lost(time: Time, clock: ActivityClock) -> None:
    clock.begin_update()
    time.now += 4
    clock.set_busy(True)
    time.now += 1
    clock.end_update(5.0)
    assert clock.take_activity(0).paused_s == 1


def test_an_engine_that_starts_is_not_idle(time: Time, clock: ActivityClock) -> None:
    time.now += 60
    assert clock.take_activity(0).wall_s == 0
    time.now += 20
    clock.set_busy(True)
    time.now += 5
    activity = clock.take_activity(1)
    assert (activity.busy_s, activity.wall_s) == (5, 5)
    clock.set_busy(False)
    time.now += 10
    assert clock.take_activity(1).wall_s == 10, "idle from now on"
