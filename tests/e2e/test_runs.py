"""Whole runs: what they learn, what they write, and that equal settings give equal results, bit for bit."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from .conftest import BASE_SPEC, Runs, rows
from .faults.disturbed import DisturbedRun
from .faults.moments import AIM_S
from .faults.verdict import differences
from .journal import assert_staleness_is_bounded

pytestmark = pytest.mark.stack

UNFINISHED = """SELECT count(*) FROM segments AS part WHERE NOT EXISTS (
    SELECT 1 FROM rollouts AS whole WHERE whole.group_id = part.group_id
    AND whole.rollout_index = part.rollout_index AND whole.finish_reason IS NOT NULL)"""
"""Segments of unfinished rollouts in a journal."""


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
# tokens, because random numbers depend on seed and position only (decision 0064).
def test_async_without_staleness_is_sync_to_the_bit(shared_runs: Runs, sync_run: Path) -> None:
    run = with_a_killed_engine(
        shared_runs,
        pipeline={"mode": "async", "max_staleness": 0, "weight_update": "keep"},
        rollout={"engines": 2, "max_running_rollouts": 32},
    )
    assert differences(run, sync_run) == []
    # The comparison means something only if the weights moved.
    trained = rows(run, "metrics.jsonl")
    assert sum(row["train/updates"] for row in trained) > 0
    assert any(row["publish/probe_change"] > 1e-3 for row in trained)
    assert max(row.get("engine/logprob_gap_max", 0.0) for row in trained) < 1e-4


def test_sync_never_trains_on_old_tokens(sync_run: Path) -> None:
    assert all(row["staleness/tokens_max"] == 0 for row in rows(sync_run, "metrics.jsonl"))


@pytest.mark.rotating
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
            {"zero_stage": 0, "gradient_checkpointing": True},
            id="partial_rollouts",
        ),
    ],
)
def test_staleness_keeps_its_bound_and_every_engine_proves_its_weights(
    shared_runs: Runs, pipeline: dict[str, object], trainer: dict[str, object]
) -> None:
    assert_staleness_is_bounded(shared_runs.train(pipeline=pipeline, trainer=trainer, stop={"steps": 8}))
