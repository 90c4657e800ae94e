"""`asyncrl_cli.load_run`: a run's records as tables, with and without pandas."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest

from asyncrl_cli import load_run
from asyncrl_cli.core.errors import RunError
from asyncrl_cli.journal.schema import FILE, open_for_writing
from tests.inspect.made_runs import SITUATIONS, made_run


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    run = made_run(tmp_path / "runs", monkeypatch, SITUATIONS["slow trainer"], steps=5, run_id="made")
    journal = open_for_writing(run.path / FILE)
    journal.execute("INSERT INTO evaluations VALUES (4, 'greedy', 1.0, 0.5, 0.5, 3.0, 8, 4, 4)")
    journal.execute("""UPDATE rollouts SET metrics = '{"format": 0.5}', crc = NULL WHERE rollout_index = 1""")
    journal.close()
    (run.path / "evaluations").mkdir()
    lines = [{"accuracy": 0.5}, {"uid": "a", "response": "4"}, {"uid": "b", "response": "5"}]
    (run.path / "evaluations/step-000004-greedy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run.path


@pytest.mark.parametrize("with_pandas", [True, False])
def test_tables_have_the_rows_of_the_journal(made: Path, monkeypatch: pytest.MonkeyPatch, with_pandas: bool) -> None:
    if not with_pandas:
        monkeypatch.setitem(sys.modules, "pandas", None)

    def rows(table: Any) -> list[dict[str, Any]]:
        assert isinstance(table, pandas.DataFrame if with_pandas else list)
        found: list[dict[str, Any]] = json.loads(table.to_json(orient="records")) if with_pandas else table
        return found

    run = load_run("latest", made.parent)
    assert run.run_id == "made" and load_run(made).path == made
    assert [row["step"] for row in rows(run.metrics)] == [1, 2, 3, 4, 5]
    assert {row["tokens/trained"] for row in rows(run.metrics)} == {100.0}
    groups, rollouts = rows(run.groups), rows(run.rollouts)
    assert sorted(row["step"] for row in groups if row["step"]) == sorted([1, 2, 3, 4, 5] * 2)
    trained = [row for row in rollouts if row["step"]]
    assert len(trained) == 20 and {(row["index"], row["reward"]) for row in trained} == {(0, 0.0), (1, 1.0)}
    assert {row["metrics/format"] for row in rollouts if row["index"] == 1} == {0.5}
    assert [(row["step"], row["kind"], row["accuracy"]) for row in rows(run.evaluations)] == [(4, "greedy", 0.5)]
    assert [(row["uid"], row["response"]) for row in rows(run.samples)] == [("a", "4"), ("b", "5")]


def test_texts_and_missing_rollouts(made: Path) -> None:
    run = load_run(made)
    for found in ((0,), (pandas.Series([0]).iloc[0], 0)):  # a value of a table is NumPy's
        with pytest.raises(RunError, match=r"tokenizer\.json"):
            run.text(*found)
    for group, index in ((0, 9), (10**9, 0)):
        with pytest.raises(RunError, match=f"no rollout {index} of group {group}"):
            run.text(group, index)
    with pytest.raises(RunError, match="no run is called"):
        load_run("nothing", made.parent)


def test_the_import_stays_light() -> None:
    program = (
        "import sys, asyncrl_cli; asyncrl_cli.load_run; sys.exit(any('asyncrl_cli.' in name for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
