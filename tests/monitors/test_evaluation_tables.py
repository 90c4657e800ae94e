"""An evaluation as a table in MLflow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.monitors.mlflow.outbox import FILE
from asyncrl_cli.monitors.mlflow.sender import TABLES_TAG, TAG_LENGTH, Sender, table, tables_tag

from .mlflow_runs import Logged, evaluate, local, started_run, tracking_at

MESSAGES = [{"role": "user", "content": "Ünd?"}]
SAMPLES = [
    {"uid": "a", "prompt": "1 + 1", "response": "2", "finished": True, "reward": 1.0, "metrics": {"turns": 2.0}},
    {"uid": "b", "prompt": MESSAGES, "response": "", "finished": False, "reward": 0.0, "failure": "no time"},
    {"uid": "c", "prompt": "?", "response": "!", "finished": True, "reward": float("nan"), "oldest": 3, "newest": 4},
]


def test_the_table_has_a_row_with_all_fields_for_each_response(tmp_path: Path) -> None:
    run = started_run(tmp_path)
    evaluate(run, 5, 0.5, SAMPLES)
    made = json.loads(table(run.path / "evaluations/step-000005-greedy.jsonl"), parse_constant=pytest.fail)
    rows = [dict(zip(made["columns"], row, strict=True)) for row in made["data"]]
    assert [row["uid"] for row in rows] == ["a", "b", "c"]
    assert all((row["step"], row["kind"]) == (5, "greedy") for row in rows)
    assert rows[0]["turns"] == 2.0
    assert rows[0]["failure"] is None
    assert json.loads(rows[1]["prompt"]) == MESSAGES
    assert rows[1]["failure"] == "no time"
    assert rows[2]["reward"] is None, "JSON cannot represent this number"
    assert (rows[2]["oldest"], rows[2]["newest"]) == (3, 4)
    assert made["columns"][:7] == ["step", "kind", "uid", "prompt", "response", "reward", "finished"]


@pytest.mark.parametrize("count", [0, 1, 100, 1000])
def test_the_tag_is_json_that_fits_and_names_the_last_tables(count: int) -> None:
    names = [f"evaluations/step-{step:06d}-greedy.json" for step in range(count)]
    value = tables_tag(names)
    named = [entry["path"] for entry in json.loads(value)]
    assert len(value) <= TAG_LENGTH
    assert named == names[count - len(named) :]
    assert len(named) == count or len(value) > TAG_LENGTH - 100, "as many tables as the tag has room for"


@pytest.mark.stack
def test_mlflow_loads_each_table_once_however_often_it_was_sent(tmp_path: Path) -> None:
    run, target = started_run(tmp_path), local(tmp_path)
    evaluate(run, 0, 0.5, SAMPLES)
    Sender(run, target).send("RUNNING")
    evaluate(run, 5, 0.5, SAMPLES[:1])
    Sender(run, target).send("RUNNING")
    (run.path / FILE).unlink()  # as if killed before recording the sent data
    Sender(run, target).send("FINISHED")

    logged = Logged(target.uri)

    def loaded(step: int) -> Any:
        name = f"evaluations/step-{step:06d}-greedy.json"
        with tracking_at(target.uri):
            return logged.client.load_table(logged.run.info.experiment_id, name, [logged.run.info.run_id])

    assert loaded(0)["uid"].tolist() == ["a", "b", "c"]
    assert loaded(0)["response"].tolist() == ["2", "", "!"]
    assert loaded(5)["reward"].tolist() == [1.0]
    assert [entry["type"] for entry in json.loads(logged.run.data.tags[TABLES_TAG])] == ["table", "table"]
