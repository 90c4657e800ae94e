"""The trainer's activities and their times."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl_cli.journal.queries import snapshot
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.journal.step_timeline import first_publish, step_spans
from tests.journal.recorded_run import PUBLISH_S, STARTED, TRAIN_S, RecordedRun, settings


def test_spans_are_the_recorded_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecordedRun(tmp_path / FILE, monkeypatch, settings(publish_every=2), lambda _: 3.0)
    ended = []
    for _ in range(5):
        run.step()
        ended.append(run.now)
    run.take()  # it is not trained
    with snapshot(tmp_path / FILE) as connection:
        first = first_publish(connection)
        spans = list(step_spans(connection, 2))
    assert first is not None and (first.version, first.ended_at) == (0, STARTED)
    assert [span.step for span in spans] == [0, 1, 2, 3, 4]
    assert [span.publish.version if span.publish else None for span in spans] == [None, 1, None, 2, None]
    assert [span.ended_at for span in spans] == ended
    for span in spans:
        assert span.trained_until - span.taken_at == TRAIN_S
        if span.publish:
            assert span.publish.ended_at - span.publish.begun_at == PUBLISH_S
