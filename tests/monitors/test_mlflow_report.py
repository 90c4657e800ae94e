"""The report in MLflow."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl_cli.monitors.mlflow.outbox import FILE
from asyncrl_cli.monitors.mlflow.sender import Sender
from asyncrl_cli.runs.directory import RunDirectory
from tests.inspect.made_runs import Situation, made_run
from tests.journal.recorded_run import settings

from .mlflow_runs import Logged, do_steps, evaluate, local, started_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run of twelve steps."""
    run = made_run(tmp_path / "runs", monkeypatch, Situation("training"), of=settings(max_staleness=2))
    do_steps(run, 1, 12)
    run.update(phase="running")
    return run


@pytest.mark.stack
def test_mlflow_gets_the_report_of_a_run_as_it_ended_and_once(run: RunDirectory, tmp_path: Path) -> None:
    target = local(tmp_path)
    Sender(run, target).send("RUNNING")
    assert "report.html" not in Logged(target.uri).files()

    first = Sender(run, target)
    first.send("FAILED", run.as_if(phase="failed", reason="no disk, <b>none</b>"))
    assert (first.reported, first.unreported) == (True, "")
    logged = Logged(target.uri)
    page = logged.content("report.html").decode()
    assert page.rstrip().endswith("</html>")
    assert "The run failed: no disk, &lt;b&gt;none&lt;/b&gt;." in page

    again = Sender(run, target)
    again.send("FAILED", run)
    assert not again.reported, "it has the report"

    (run.path / FILE).unlink()  # as if killed before recording the sent data
    files = logged.files()
    Sender(run, target).send("FAILED", run)
    assert Logged(target.uri).files() == files


@pytest.mark.stack
def test_a_resumed_run_gets_a_new_report(run: RunDirectory, tmp_path: Path) -> None:
    target = local(tmp_path)
    Sender(run, target).send("FAILED", run.as_if(phase="failed", reason="no disk"))
    do_steps(run, 13, 14)
    Sender(run, target).send("FINISHED", run.as_if(phase="finished"))
    page = Logged(target.uri).content("report.html").decode()
    assert "no disk" not in page


@pytest.mark.stack
def test_a_failed_report_does_not_stop_other_uploads(tmp_path: Path) -> None:
    run, target = started_run(tmp_path), local(tmp_path)
    do_steps(run, 1, 2)
    evaluate(run, 0, 0.5)
    sender = Sender(run, target)
    sender.send("FINISHED", run.as_if(phase="finished"))
    assert "there is no journal" in sender.unreported
    assert not sender.reported
    logged = Logged(target.uri)
    assert logged.run.info.status == "FINISHED"
    assert {"spec.yaml", "evaluations/step-000000-greedy.json"} <= logged.files()
