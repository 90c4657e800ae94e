"""Notices of the end of a run, and their texts."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.monitors.console import PlainView
from asyncrl_cli.orchestrator import launch
from asyncrl_cli.orchestrator.experiment import Experiment
from asyncrl_cli.orchestrator.interrupts import Interrupted
from asyncrl_cli.orchestrator.launch import Outcome, Start, run_experiment
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import NotifySpec


@pytest.mark.parametrize(
    ("end", "event", "message"),
    [
        (
            Outcome(12.4, accuracy={"greedy": 0.5}),
            "finish",
            "finished 9 steps in 12 s, held-out accuracy (greedy) 0.500",
        ),
        (RunError("no space", location="journal.db"), "failure", "journal.db: no space"),
        (ZeroDivisionError(), "failure", "ZeroDivisionError"),
        (Interrupted(), None, None),
    ],
    ids=["finish", "failure", "bug", "interruption"],
)
def test_the_end_of_a_run_is_sent(
    end: Outcome | BaseException,
    event: str | None,
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def finished(*_: Any, **__: Any) -> Outcome:
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr(launch, "ray_cluster", lambda *_: nullcontext())
    monkeypatch.setattr(launch, "_run", finished)
    run = RunDirectory.create(tmp_path, "test")
    run.update(step=9)
    spec = SimpleNamespace(notify=NotifySpec(command="cat >> sent"))
    monkeypatch.chdir(tmp_path)
    experiment = cast("Experiment", SimpleNamespace(spec=spec, monitors=()))
    with nullcontext() if isinstance(end, Outcome) else pytest.raises(type(end)):
        run_experiment(experiment, run, PlainView(10, io.StringIO()), Start())
    sent = tmp_path / "sent"
    if event is None:
        assert not sent.exists(), "the user stopped it"
    else:
        notice = json.loads(sent.read_text())
        assert (notice["event"], notice["message"], notice["step"]) == (event, message, 9)


def test_on_a_full_disk_the_cause_is_sent_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any, **__: Any) -> Outcome:
        raise RunError("no space left on device", location="journal.db", hint="Make room")

    monkeypatch.setattr(launch, "ray_cluster", lambda *_: nullcontext())
    monkeypatch.setattr(launch, "_run", fails)
    run, out = RunDirectory.create(tmp_path, "test"), io.StringIO()
    (run.path / "state.json").unlink(missing_ok=True)
    (run.path / "state.json").mkdir()  # a folder, so a file cannot replace it
    spec = SimpleNamespace(notify=NotifySpec(command="cat > ../sent"))
    experiment = cast("Experiment", SimpleNamespace(spec=spec, monitors=()))
    monkeypatch.chdir(run.path)
    with pytest.raises(RunError, match=r"journal.db: no space left on device \(Make room"):
        run_experiment(experiment, run, PlainView(10, out), Start())
    assert json.loads((tmp_path / "sent").read_text())["message"].startswith("journal.db: no space")
    assert "state.json cannot be written" in out.getvalue()
