"""A model with experts trains: each version that an engine serves is proved, under the names of its checkpoints."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Runs, rows

pytestmark = pytest.mark.stack

MIXTRAL = {
    "architecture": "mixtral",
    "config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "tokenizer": "characters",
}


def test_a_model_with_experts_trains(shared_runs: Runs) -> None:
    run = shared_runs.train(model={"init": MIXTRAL, "warm_start": None}, stop={"steps": 3})
    metrics = rows(run, "metrics.jsonl")
    assert len(metrics) == 3
    # Experts that an engine loads in the wrong order are 0.01 nats off and more.
    assert all(row["publish/probe_gap"] < 1e-3 for row in metrics)
