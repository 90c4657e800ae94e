"""Whole runs: what they learn, what they write, and that equal settings give equal results, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.monitors.mlflow_runs import tracking_at

from .conftest import BASE_SPEC, ROOT, Runs, rows
from .faults.disturbed import DisturbedRun
from .faults.moments import AIM_S
from .journal import assert_work_is_accounted_for, probe_gaps, steps_of

pytestmark = pytest.mark.stack

UNFINISHED = """SELECT count(*) FROM segments AS part WHERE NOT EXISTS (
    SELECT 1 FROM rollouts AS whole WHERE whole.group_id = part.group_id
    AND whole.rollout_index = part.rollout_index AND whole.finish_reason IS NOT NULL)"""
"""Segments of unfinished rollouts in a journal."""


def weights(run: Path) -> bytes:
    return (run / "model/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def sync_run(shared_runs: Runs) -> Path:
    return shared_runs.train(pipeline={"mode": "sync", "max_staleness": 0})


def with_a_killed_engine(runs: Runs, **sections: Any) -> Path:
    """A run in which an engine's core is killed once tokens of unfinished rollouts are recorded."""
    run = DisturbedRun(
        runs,
        runs.write_spec(journal={"segment_seconds": 0.02}, **sections),
        BASE_SPEC["stop"]["steps"],
        random.Random(0),
    )
    try:
        run.start()
        core, *_ = run.until(lambda: run.pids("core"), "an engine's core")
        run.until(lambda: run.ask(UNFINISHED), "an unfinished rollout", AIM_S)
        os.kill(core, signal.SIGKILL)
        run.finish(resumes=1)
    finally:
        run.end()
    assert run.ask("SELECT count(*) FROM failures WHERE kind = 'engine'") == 1, run.printed()
    return run.folder


# Two engines compete for the same groups, and rollouts of an engine that dies continue on the other: with the same
# tokens, because random numbers depend on seed and position only (decision 0064). With one engine nothing
# is killed.
@pytest.mark.parametrize("engines", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_async_without_staleness_is_sync_to_the_bit(shared_runs: Runs, sync_run: Path, engines: int) -> None:
    sections: dict[str, Any] = {
        "pipeline": {"mode": "async", "max_staleness": 0, "weight_update": "keep"},
        "rollout": {"engines": engines, "max_running_rollouts": 64 // engines, "speculative_tokens": 3},
    }
    run = shared_runs.train(**sections) if engines == 1 else with_a_killed_engine(shared_runs, **sections)
    assert steps_of(run) == steps_of(sync_run), "the same prompts, and the same tokens"
    assert weights(run) == weights(sync_run)
    assert "Speculative decoding on CPU" in (run / "logs/engine-0.log").read_text(), "vLLM warns of it"
    assert all(step.digest for step in steps_of(run))
    # The comparison means something only if the weights moved.
    trained = rows(run, "metrics.jsonl")
    assert sum(row["train/updates"] for row in trained) > 0
    assert any(row["publish/probe_change"] > 1e-3 for row in trained)
    assert max(row.get("engine/logprob_gap_max", 0.0) for row in trained) < 1e-4


def test_sync_never_trains_on_old_tokens(sync_run: Path) -> None:
    assert all(row["staleness/tokens_max"] == 0 for row in rows(sync_run, "metrics.jsonl"))


@pytest.mark.parametrize(
    ("pipeline", "trainer"),
    [
        pytest.param(
            {"max_staleness": 3, "publish_every": 2, "weight_update": "recompute"},
            {"zero_stage": 2},
            id="recompute_every_2",
        ),
        pytest.param(
            {"mode": "sync", "partial_rollouts": True, "max_staleness": 1},
            {"zero_stage": 0},
            id="partial_rollouts",
            marks=pytest.mark.rotating,
        ),
        pytest.param(
            {"mode": "one_step_off", "max_staleness": 1},
            {"zero_stage": 0, "gradient_checkpointing": True},
            id="one_step_off",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"max_staleness": 1, "on_stale": "requeue"},
            {"zero_stage": 3, "minibatches": 2},
            id="requeue",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_staleness_keeps_its_bound_and_every_engine_proves_its_weights(
    shared_runs: Runs, pipeline: dict[str, object], trainer: dict[str, object]
) -> None:
    run = shared_runs.train(pipeline=pipeline, trainer=trainer, stop={"steps": 8})
    metrics = rows(run, "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, 9))
    assert max(row["staleness/groups_max"] for row in metrics) <= pipeline["max_staleness"]  # type: ignore[operator]
    assert max(row["staleness/tokens_max"] for row in metrics) <= pipeline["max_staleness"]  # type: ignore[operator]
    assert metrics[-1]["buffer/groups_late"] == 0
    every = int(str(pipeline.get("publish_every", 1)))
    if pipeline.get("partial_rollouts"):
        assert any(row["staleness/rollouts_crossed"] > 0 for row in metrics)
    gaps = probe_gaps(run)
    assert list(gaps) == list(range(every, 9, every))
    assert max(gaps.values()) < 1e-4
    assert all(row["engine/logprob_gap_max"] < 1e-4 for row in metrics if "engine/logprob_gap_max" in row)
    uids = [uid for step in steps_of(run) for uid in step.uids]
    assert len(set(uids)) == len(uids) == 8 * 8, "nothing is trained twice"
    if pipeline.get("on_stale") != "requeue":  # which cancels requests
        assert_work_is_accounted_for(run)


HALF = 30
"""Steps of the run with two ranks, whose spec has 60: it has learned by then."""


@pytest.fixture(scope="module")
def two_ranks(shared_runs: Runs) -> Path:
    """A run of specs/zero3-two-ranks.yaml for the first half of its steps."""
    spec = ROOT / "specs/zero3-two-ranks.yaml"
    changes = (f"runs_dir={shared_runs.folder}", f"stop.steps={HALF}")
    ended = shared_runs.run("train", spec, *(word for change in changes for word in ("--set", change)))
    assert ended.code == 0, ended.out + ended.err + shared_runs.logs()
    assert f"finished {HALF} steps" in ended.out
    return shared_runs.newest()


@pytest.mark.slow
def test_two_zero3_ranks_learn(two_ranks: Path) -> None:
    before, after = (
        json.loads((two_ranks / f"evaluations/step-{step:06d}-greedy.jsonl").read_text().splitlines()[0])["accuracy"]
        for step in (0, HALF)
    )
    assert before < 0.3
    assert after > before + 0.3


@pytest.mark.slow
def test_the_final_model_loads_in_transformers_and_answers_as_the_engine_did(two_ranks: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(two_ranks / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(two_ranks / "model")
    samples = rows(two_ranks, f"evaluations/step-{HALF:06d}-greedy.jsonl")[1:17]
    for sample in samples:
        ids = tokenizer(sample["prompt"], return_tensors="pt").input_ids
        answer = model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(answer, skip_special_tokens=True) == sample["response"]


@pytest.mark.slow
def test_mlflow_has_parameters_metrics_and_artifacts(two_ranks: Path) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{two_ranks.parent}/mlflow.db")
    run_id = json.loads((two_ranks / "mlflow.json").read_text())["run_id"]
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["trainer.ranks"] == "2"
    assert len(client.get_metric_history(run_id, "reward/mean")) == HALF
    assert run.data.metrics["eval/greedy_accuracy"] > 0
    names = {artifact.path for artifact in client.list_artifacts(run_id)}
    assert {"spec.yaml", "evaluations", "report.html"} <= names
    assert client.get_metric_history(run_id, "system/cpu_utilization_percentage")
    with tracking_at(f"sqlite:///{two_ranks.parent}/mlflow.db"):
        table = client.load_table(run.info.experiment_id, f"evaluations/step-{HALF:06d}-greedy.json", [run_id])
    assert len(table) == len(rows(two_ranks, f"evaluations/step-{HALF:06d}-greedy.jsonl")) - 1
