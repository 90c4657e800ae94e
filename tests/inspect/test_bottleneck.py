"""The limit of a run's speed: how the trainer spent its time, and runs with a known limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.cli.app import main
from asyncrl_cli.inspect.report.evidence import (
    PARTS,
    Activity,
    TrainerPart,
    activity,
    besides,
    breakdown,
    enough_finished,
    split_wait,
    trainer_time,
)
from asyncrl_cli.inspect.report.page import summarize
from asyncrl_cli.journal.ledger import Batch, Ledger
from asyncrl_cli.journal.queries import snapshot
from asyncrl_cli.journal.schema import FILE, open_for_writing
from asyncrl_cli.journal.step_timeline import step_spans
from asyncrl_cli.plan.prediction import advice
from asyncrl_cli.records.groups import BufferSettings
from tests.inspect.made_runs import SITUATIONS, made_run
from tests.inspect.quickstart_run import SPEC, quickstart_run
from tests.journal.recorded_run import STARTED, RecordedRun, settings

pytestmark = pytest.mark.slow

TIMES = st.floats(0, 1000, allow_nan=False).map(lambda value: round(value, 3))
EVALUATED = {"evaluation": {"every": 10, "fix_version": True}}


@given(TIMES, TIMES, TIMES, TIMES, TIMES, TIMES)
def test_the_parts_of_a_wait_add_up(
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
def test_waits(times: tuple[float, ...], cut: dict[TrainerPart, float]) -> None:
    assert split_wait(*times) == cut


@given(
    st.lists(st.integers(1, 40), min_size=30, max_size=30),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_waits_for_due_groups_match_the_ledger(seconds: list[int], bound: int, every: int, per_step: int) -> None:
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


def spending(part: TrainerPart, **shares: float) -> Activity:
    """A trainer that did only one thing."""
    known = {"engines_busy": None, "engines_paused": None, "journal_busy": None} | shares
    return Activity(dict.fromkeys(PARTS, 0.0) | {part: 1.0}, **known)


def test_discarded_groups_are_mentioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = settings(max_staleness=1, on_stale="requeue")
    run = RecordedRun(tmp_path / FILE, monkeypatch, of, lambda g: 60.0 if g % 3 == 0 else 2.0, 4)
    for _ in range(12):
        run.step()
    with snapshot(tmp_path / FILE) as connection:
        text = " ".join(besides(connection, {}, list(step_spans(connection, 1)), of, spending("training")))
    assert "were cancelled and started again" in text and "rejected" not in text


def test_costs_outside_the_simulation_are_mentioned_if_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = settings(max_staleness=2)
    run = RecordedRun(tmp_path / FILE, monkeypatch, of, lambda g: 2.0, 4)
    for _ in range(12):
        run.step()

    def text(spent: Activity, spec: Any = EVALUATED) -> str:
        with snapshot(tmp_path / FILE) as connection:
            return " ".join(besides(connection, spec, list(step_spans(connection, 1)), of, spent))

    assert text(spending("training")) == text(spending("generation")) == ""
    assert "checkpoints.every" in text(spending("saving"))
    assert "faster local disk" in text(spending("between", journal_busy=0.9))
    assert "evaluation.every" in text(spending("between")) and "evaluation.fix_version" in text(spending("between"))
    assert "asyncrl timeline" in text(spending("between"), {})


def test_waiting_for_the_first_rollouts_is_not_a_bottleneck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer is the bottleneck of this run, and its first rollouts take long."""
    run = RecordedRun(tmp_path / FILE, monkeypatch, settings(max_staleness=2), lambda g: 40.0 if g < 6 else 1.0, 8)
    for _ in range(20):
        run.step()
    with snapshot(tmp_path / FILE) as connection:
        times = trainer_time(connection, list(step_spans(connection, 1)), 2)
    spent, start = activity(times, []), activity(times[:3], [])
    assert spent is not None and max(spent.trainer, key=lambda part: spent.trainer[part]) == "training"
    assert start is not None and max(start.trainer, key=lambda part: start.trainer[part]) != "training"
    assert breakdown(spent).startswith("The trainer's time: training ")


def test_the_engines_limited_the_quickstart_and_every_command_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real run, with the times of its requests. A larger bound saves 6 % there, and more engines 34 %."""
    run = quickstart_run(tmp_path)
    found = summarize(run)
    assert not isinstance(found.prediction, str)
    assert found.prediction.limit == "engines"
    limit, _, bound, _ = advice(found.prediction)
    answer = found.answers[2]
    assert answer.answer == limit and bound in answer.more
    assert limit.startswith("The engines limit the speed: with twice as many, steps would take 3")
    for command in (
        ("staleness", "--what-if", "4"),
        ("plan", str(SPEC), "--calibrate-from", "latest"),
    ):
        monkeypatch.setattr("sys.argv", ["asyncrl", *command, "--runs-dir", str(tmp_path)])
        with pytest.raises(SystemExit):
            main()
        printed = " ".join(capsys.readouterr().out.split())
        assert limit in printed and bound in printed, command
    journal = open_for_writing(run.path / FILE)
    journal.execute("UPDATE batches SET metrics = json_set(metrics, '$.\"response/truncated_ratio\"', 0.9)")
    journal.close()
    with pytest.raises(SystemExit):
        main()  # the last command again
    printed = " ".join(capsys.readouterr().out.split())
    assert "advice none: the training has been unhealthy since step 1 (truncated_responses)" in printed
    assert limit not in printed and bound not in printed and "helps" not in printed


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_bottleneck_of_a_made_run_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    situation = SITUATIONS[name]
    run = made_run(tmp_path, monkeypatch, situation)
    summary = summarize(run)
    if situation.limit is None:
        # One reward at a time: the simulator has no queue of rewards.
        assert summary.prediction == (
            "the simulator does not reproduce the recorded steps within 10 % (the worst part: engines)"
        )
        assert summary.answers[2].answer.startswith("No advice: the simulator does not reproduce")
        assert "waiting for rewards" in summary.answers[2].more[0]
    else:
        assert not isinstance(summary.prediction, str)
        assert summary.prediction.limit == situation.limit
        assert summary.answers[2].answer == advice(summary.prediction)[0]


def test_the_trainers_time_excludes_the_time_while_the_run_was_down(
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
    spent = [sum(time.seconds.values()) for time in times]
    assert sum(spent[:4]) == pytest.approx(crashed - STARTED)
    assert sum(spent[4:]) == pytest.approx(run.now - spans[4].taken_at)
    waited = sum(time.seconds["generation"] + time.seconds["due"] for time in times[:4])
    assert waited == pytest.approx(sum(run.waited[:4]))
    found = activity(times, [])
    assert found is not None and sum(found.trainer.values()) == pytest.approx(1.0)
    assert activity([], []) is None
