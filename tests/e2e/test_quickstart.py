"""The main example of the README: what it learns, and what its run leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.monitors.mlflow_runs import tracking_at

from .conftest import LIMIT_S, Runs, rows
from .journal import assert_staleness_is_bounded
from .quickstart import SHORT, accuracies, assert_answers_as_the_engine_did, assert_learned, train_quickstart

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.fixture(scope="module")
def short_run(shared_runs: Runs) -> Path:
    return train_quickstart(shared_runs, *SHORT, limit_s=LIMIT_S)


def test_the_quickstart_learns_with_shorter_sums(short_run: Path) -> None:
    accuracy = accuracies(short_run)
    for kind, gain in (("greedy", 0.35), ("sampled", 0.2)):
        before, after = accuracy[kind, "before"], accuracy[kind, "after"]
        assert before["accuracy"] < 0.35
        assert after["accuracy"] > before["accuracy"] + gain
        assert after["mean_length"] > 1.5 * before["mean_length"], "it explains its steps"


@pytest.mark.rotating
def test_the_quickstart_learns(shared_runs: Runs) -> None:
    assert_learned(train_quickstart(shared_runs, limit_s=LIMIT_S))


def test_staleness_keeps_its_bound_and_every_engine_proves_its_weights(short_run: Path) -> None:
    assert_staleness_is_bounded(short_run)


def test_the_final_model_loads_in_transformers_and_answers_as_the_engine_did(short_run: Path) -> None:
    assert_answers_as_the_engine_did(short_run)


def test_mlflow_has_parameters_metrics_and_artifacts(short_run: Path) -> None:
    from mlflow.tracking import MlflowClient

    steps = len(rows(short_run, "metrics.jsonl"))
    client = MlflowClient(tracking_uri=f"sqlite:///{short_run.parent}/mlflow.db")
    run_id = json.loads((short_run / "mlflow.json").read_text())["run_id"]
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["trainer.ranks"] == "1"
    assert len(client.get_metric_history(run_id, "reward/mean")) == steps
    assert run.data.metrics["eval/greedy_accuracy"] > 0
    names = {artifact.path for artifact in client.list_artifacts(run_id)}
    assert names == {"spec.yaml", "evaluations", "responses"}
    with tracking_at(client.tracking_uri):
        responses, held_out = (
            client.load_table(run.info.experiment_id, f"responses/{name}.json", [run_id])
            for name in ("training", "greedy")
        )
    assert set(responses["step"]) == set(range(10, steps + 1, 10)) and (responses["staleness"] >= 0).all()
    assert responses["response"].str.contains("=").any() and set(responses["reward"]) <= {0.0, 1.0}
    assert set(held_out["step"]) == {0, steps} and list(held_out["prompt"][:16]) == list(held_out["prompt"][-16:])
