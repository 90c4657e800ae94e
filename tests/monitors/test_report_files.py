"""The report in MLflow: the page and its charts as pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl_cli.inspect.report.charts import SERIES, Chart
from asyncrl_cli.inspect.report.files import write_report
from asyncrl_cli.inspect.report.pictures import draw
from asyncrl_cli.inspect.report.summary import summarize
from asyncrl_cli.monitors.mlflow.outbox import FILE
from asyncrl_cli.monitors.mlflow.sender import Sender
from asyncrl_cli.runs.directory import RunDirectory
from tests.buffer.recorded_run import settings
from tests.inspect.made_runs import Situation, made_run, vary_metrics

from .mlflow_runs import Logged, do_steps, evaluate, local, started_run

PNG = b"\x89PNG\r\n\x1a\n"
END_OF_PNG = b"IEND\xaeB`\x82"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run of twelve steps with every metric that a chart shows."""
    run = made_run(tmp_path / "runs", monkeypatch, Situation("training"), of=settings(max_staleness=2))
    vary_metrics(run, SERIES)
    do_steps(run, 1, 12)
    run.update(phase="running")
    return run


def test_every_chart_becomes_a_picture(run: RunDirectory, tmp_path: Path) -> None:
    write_report(run, tmp_path / "report")
    assert run.run_id in (tmp_path / "report/report.html").read_text()
    pictures = {path.name: path.read_bytes() for path in (tmp_path / "report/plots").iterdir()}
    own = len(summarize(run).charts)
    assert own >= 4, "times, staleness, lengths and rewards"
    assert {"reward.png", "loss.png", "the-trainers-time.png", "tokens-by-their-lag-in-versions.png"} <= pictures.keys()
    assert {"length-and-reward-of-rollouts.png", "length-of-responses-tokens.png"} <= pictures.keys()
    for picture in pictures.values():
        assert picture.startswith(PNG)
        assert picture.endswith(END_OF_PNG)
    assert len(set(pictures.values())) == len(pictures)


def test_bars_stand_on_one_another(tmp_path: Path) -> None:
    from matplotlib.image import imread

    bars = [
        {"type": "bar", "name": colour, "x": [1, 2], "y": [0.5, 0.5], "marker": {"color": colour}}
        for colour in ("#ff0000", "#0000ff")
    ]
    draw([Chart("Half and half", bars, {})], tmp_path)
    pixels = imread(tmp_path / "half-and-half.png")[..., :3]
    red, blue = ((pixels == colour).all(-1).nonzero()[0] for colour in ((1, 0, 0), (0, 0, 1)))
    assert len(red) > 1000
    assert 0.9 < len(red) / len(blue) < 1.1
    assert red.min() > blue.max(), "below it, and rows of a picture count from its top"


def test_points_that_are_not_joined_have_no_line_between_them(tmp_path: Path) -> None:
    from matplotlib.image import imread

    points = {
        "type": "scatter",
        "mode": "markers",
        "name": "two",
        "y": [0.0, 1.0],
        "line": {"color": "#ff0000", "dash": "solid", "width": 2.0},
        "marker": {"color": "#ff0000"},
    }
    draw([Chart("Two", [points], {}, {"steps": [[0.0, 140.0]]})], tmp_path)
    pixels = imread(tmp_path / "two.png")[..., :3]
    columns = set((pixels == (1, 0, 0)).all(-1).nonzero()[1].tolist())
    assert 4 <= len(columns) <= 40


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
    assert {"plots/reward.png", "plots/loss.png"} <= logged.files()

    again = Sender(run, target)
    again.send("FAILED", run)
    assert not again.reported, "it has it"

    (run.path / FILE).unlink()  # killed before it could note what it had sent
    files = logged.files()
    Sender(run, target).send("FAILED", run)
    assert Logged(target.uri).files() == files


@pytest.mark.stack
def test_a_run_that_went_on_gets_a_new_report(run: RunDirectory, tmp_path: Path) -> None:
    target = local(tmp_path)
    Sender(run, target).send("FAILED", run.as_if(phase="failed", reason="no disk"))
    do_steps(run, 13, 14)
    Sender(run, target).send("FINISHED", run.as_if(phase="finished"))
    page = Logged(target.uri).content("report.html").decode()
    assert "no disk" not in page


@pytest.mark.stack
def test_a_report_that_cannot_be_made_keeps_nothing_else_back(tmp_path: Path) -> None:
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
