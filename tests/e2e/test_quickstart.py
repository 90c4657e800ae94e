"""The main example of the README: what it learns, and what its run leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl_cli.spec.load import load_spec
from tests.monitors.mlflow_runs import tracking_at

from .conftest import ROOT, Runs, rows
from .journal import assert_staleness_is_bounded

pytestmark = [pytest.mark.stack, pytest.mark.slow]

STEPS = 30
"""Half as many as the spec has. About nine of ten sampled responses are correct by then."""
SHORT = (
    "stop.steps=20",
    "evaluation.every=20",
    "task.options={min_terms: 2, max_terms: 3}",
    "pipeline.groups_per_step=16",
)
"""Changes for a run that takes a third of the time: shorter sums, fewer and smaller steps."""


def train_quickstart(runs: Runs, *changes: str) -> Path:
    """Train it with these ``--set`` arguments for ``STEPS`` steps; returns the run's folder."""
    # No assertion needs the evaluations between the first step and the last.
    words = (f"runs_dir={runs.folder}", f"stop.steps={STEPS}", f"evaluation.every={STEPS}", *changes)
    spec = ROOT / "specs/quickstart.yaml"
    ended = runs.succeed("train", spec, *(word for change in words for word in ("--set", change)))
    run = runs.newest()
    assert f"finished {rows(run, 'metrics.jsonl')[-1]['step']} steps" in ended.out
    return run


def accuracies(run: Path) -> dict[tuple[str, str], dict[str, float]]:
    """The results of the first evaluations and of the last ones, by kind and time."""
    last = rows(run, "metrics.jsonl")[-1]["step"]
    return {
        (kind, when): rows(run, f"evaluations/step-{step:06d}-{kind}.jsonl")[0]
        for kind in ("greedy", "sampled")
        for when, step in (("before", 0), ("after", last))
    }


@pytest.fixture(scope="module")
def short_run(shared_runs: Runs) -> Path:
    return train_quickstart(shared_runs, *SHORT)


def test_the_quickstart_learns_with_shorter_sums(short_run: Path) -> None:
    accuracy = accuracies(short_run)
    for kind, gain in (("greedy", 0.35), ("sampled", 0.2)):
        before, after = accuracy[kind, "before"], accuracy[kind, "after"]
        assert before["accuracy"] < 0.35
        assert after["accuracy"] > before["accuracy"] + gain
        assert after["mean_length"] > 1.5 * before["mean_length"], "it explains its steps"


@pytest.mark.rotating
def test_the_quickstart_learns(shared_runs: Runs) -> None:
    accuracy = accuracies(train_quickstart(shared_runs))
    assert accuracy["greedy", "before"]["accuracy"] < 0.4
    assert accuracy["greedy", "after"]["accuracy"] >= 0.9
    assert accuracy["sampled", "before"]["accuracy"] < 0.35
    assert accuracy["sampled", "after"]["accuracy"] >= 0.75
    assert accuracy["greedy", "after"]["mean_length"] > 2 * accuracy["greedy", "before"]["mean_length"]


def test_staleness_keeps_its_bound_and_every_engine_proves_its_weights(short_run: Path) -> None:
    assert_staleness_is_bounded(short_run)


def test_the_final_model_loads_in_transformers_and_answers_as_the_engine_did(short_run: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(short_run / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(short_run / "model")
    last = rows(short_run, "metrics.jsonl")[-1]["step"]
    longest = load_spec(short_run / "spec.yaml").spec.rollout.max_response_tokens
    for sample in rows(short_run, f"evaluations/step-{last:06d}-greedy.jsonl")[1:17]:
        ids = tokenizer(sample["prompt"], return_tensors="pt").input_ids
        answer = model.generate(ids, max_new_tokens=longest, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(answer, skip_special_tokens=True) == sample["response"]


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
