"""Tables of responses: their size is bounded, and each step and evaluation that is due has one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.inspect.response_tables import CHARACTERS, ROWS, TABLES, TRAINING, response_tables, table_interval
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.runs.directory import RunDirectory
from tests.journal.recorded_run import RecordedRun, settings


@given(every=st.integers(1, 10_000), steps=st.integers(0, 10**9))
def test_interval_is_the_smallest_multiple_with_at_most_64_tables(every: int, steps: int) -> None:
    interval = table_interval(every, steps)
    assert interval % every == 0 and steps // interval <= TABLES
    assert interval == every or steps > (interval - every) * TABLES


def test_run_has_tables_of_training_steps_and_of_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordedRun(tmp_path / FILE, monkeypatch, settings(max_staleness=2), lambda g: 3.0 + 4 * (g % 3), 4)
    for _ in range(12):
        recorded.step()
    run = RunDirectory(tmp_path)
    run.update(step=12, steps=12)
    (tmp_path / "evaluations").mkdir()
    row = {"prompt": [{"role": "user", "content": "a"}], "response": "b" * 9000, "reward": 0.5, "metrics": {"c": 1.0}}
    for step in (0, 5, 12):
        lines = [{"kind": "set:greedy", "step": step}, *[row | {"oldest": step, "newest": step}] * 40]
        run.write_text(f"evaluations/step-{step:06d}-set-greedy.jsonl", "\n".join(map(json.dumps, lines)))
    spec = {"tracking": {"responses_every": 5}, "evaluation": {"every": 1, "sets": {"set": {"every": 5}}}}

    tables = {(table.name, table.step): table.rows for table in response_tables(run, spec, 12)}
    assert list(tables) == [("set-greedy", 0), ("set-greedy", 5), ("set-greedy", 12), (TRAINING, 5), (TRAINING, 10)]
    evaluated = tables["set-greedy", 5]
    assert len(evaluated) == ROWS and len(evaluated[0].response) == CHARACTERS + 2
    assert evaluated[0][1:2] + evaluated[0][3:] == ("user: a", 0.5, '{"c": 1.0}', 5, 5, None)
    trained = tables[TRAINING, 10]
    group_size, groups = recorded.settings.group_size, recorded.settings.groups_per_step
    assert len(trained) == min(ROWS, group_size * groups)
    assert len({row.prompt for row in trained[:groups]}) == groups, "first one response of each group"
    assert all(row.step == 10 and row.staleness is not None and 0 <= row.staleness <= 2 for row in trained)
    assert all(row.oldest_version + row.staleness == 9 for row in trained)  # type: ignore[operator]
    assert all(row.response for row in trained), "token ids, because the run has no tokenizer"

    assert [(table.name, table.step) for table in response_tables(run, spec, 12, set(tables) - {(TRAINING, 5)})] == [
        (TRAINING, 5)
    ]
    assert not list(response_tables(run, {"tracking": {"responses_every": 0}}, 12))
