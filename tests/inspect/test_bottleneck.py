"""The limit of a run's speed: how the trainer spent its time, and runs with a known limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl_cli.cli.app import main
from asyncrl_cli.inspect.report.answers import trainer_shares, trainer_time
from asyncrl_cli.inspect.report.page import summarize
from asyncrl_cli.journal.history import step_spans
from asyncrl_cli.journal.queries import snapshot
from asyncrl_cli.journal.schema import FILE, open_for_writing
from asyncrl_cli.plan.prediction import advice
from tests.inspect.made_runs import SITUATIONS, made_run
from tests.inspect.quickstart_run import SPEC, quickstart_run
from tests.journal.recorded_run import STARTED, RecordedRun, settings

pytestmark = pytest.mark.slow


def test_waiting_for_the_first_rollouts_is_not_a_bottleneck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer is the bottleneck of this run, and its first rollouts take long."""
    run = RecordedRun(tmp_path / FILE, monkeypatch, settings(max_staleness=2), lambda g: 40.0 if g < 6 else 1.0, 8)
    for _ in range(20):
        run.step()
    with snapshot(tmp_path / FILE) as connection:
        times = trainer_time(connection, list(step_spans(connection, 1)))
    spent, start = trainer_shares(times), trainer_shares(times[:3])
    assert max(spent, key=lambda part: spent[part]) == "training"
    assert max(start, key=lambda part: start[part]) == "groups"


def test_the_engines_limited_the_quickstart_and_every_command_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real run, with the times of its requests. A larger bound saves 6 % there, and more engines 34 %."""
    run = quickstart_run(tmp_path)
    found = summarize(run)
    assert not isinstance(found.prediction, str)
    assert found.prediction.limit == "engines"
    limit, _, bound = advice(found.prediction)
    answer = found.answers[2]
    assert answer.answer == limit and bound in answer.details
    assert limit.startswith("The engines limit the speed: with twice as many, steps would take 3")
    command = ("plan", str(SPEC), "--calibrate-from", "latest")
    monkeypatch.setattr("sys.argv", ["asyncrl", *command, "--runs-dir", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    printed = " ".join(capsys.readouterr().out.split())
    assert limit in printed and bound in printed
    journal = open_for_writing(run.path / FILE)
    journal.execute("UPDATE batches SET metrics = json_set(metrics, '$.\"response/truncated_ratio\"', 0.9)")
    journal.close()
    with pytest.raises(SystemExit):
        main()  # the same command again
    printed = " ".join(capsys.readouterr().out.split())
    assert "advice none: the training has been unhealthy since step 1 (truncated_responses)" in printed
    assert limit not in printed and bound not in printed


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_bottleneck_of_a_made_run_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    situation = SITUATIONS[name]
    run = made_run(tmp_path, monkeypatch, situation)
    summary = summarize(run)
    if situation.limit is None:
        # One reward at a time: the simulator has no queue of rewards.
        assert summary.prediction == "the simulator does not reproduce the recorded steps within 10 %"
        assert summary.answers[2].answer.startswith("No advice: the simulator does not reproduce")
        assert "waiting for groups" in summary.answers[2].details[0]
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
        times = trainer_time(connection, spans)
    spent = [sum(time.seconds.values()) for time in times]
    assert sum(spent[:4]) == pytest.approx(crashed - STARTED)
    assert sum(spent[4:]) == pytest.approx(run.now - spans[4].batch_taken_at)
    waited = sum(time.seconds["groups"] for time in times[:4])
    assert waited == pytest.approx(sum(run.waited[:4]))
    assert sum(trainer_shares(times).values()) == pytest.approx(1.0)
    assert trainer_shares([]) == {}
