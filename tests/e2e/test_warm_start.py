"""Supervised steps before reinforcement learning: killed and resumed, they give the same weights."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from .conftest import Runs, mark_of, rows, until
from .faults.parts import processes_of_part

pytestmark = [pytest.mark.stack, pytest.mark.rotating]

ROWS = [{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a in range(10) for b in range(10)]
UPDATES = 60


def settings(runs: Runs, **sections: Any) -> dict[str, Any]:
    (runs.folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    warm_start = {
        "data": {"path": "sft.jsonl"},
        "response_column": "completion",
        "epochs": 15,
        "steps": UPDATES,
        "batch_size": 20,
        "held_out_rows": 20,
        "evaluate_every": 25,
        "learning_rate": 1.0e-3,
        "schedule": {"kind": "linear", "warmup_updates": 5},
    }
    model = {"path": str(Path(__file__).parents[2] / "specs/models/chain-sum-0.3M"), "max_length": 64}
    return {"model": model | {"warm_start": warm_start}, "stop": {"steps": 0}, **sections}


def weights(run: Path) -> bytes:
    return (run / "model/model.safetensors").read_bytes()


def test_killed_warm_starts_give_the_weights_of_an_undisturbed_one(shared_runs: Runs) -> None:
    checkpoints = {"checkpoints": {"every": 8}}
    run = shared_runs.train(**settings(shared_runs))
    steps = rows(run, "metrics.jsonl")
    assert [row["step"] for row in steps] == list(range(-UPDATES, 1))
    assert steps[-1]["warm_start/loss"] < 0.5 * steps[1]["warm_start/loss"]
    name = "warm_start/held_out_loss"
    held_out = {row["step"] + UPDATES: row[name] for row in steps if name in row}
    assert list(held_out) == [0, 25, 50, UPDATES] and held_out[UPDATES] < 0.5 * held_out[0]
    assert not list((run / "logs").glob("engine-*.log")), "no engine is started"
    shared_runs.succeed("evaluate", run)

    process = shared_runs.start("train", shared_runs.write_spec(**settings(shared_runs, **checkpoints)))
    until(lambda: shared_runs.newest() != run and shared_runs.steps_done() > 5, "the first updates")
    killed = shared_runs.newest()
    (rank,) = processes_of_part(mark_of(process.pid), "trainer")
    os.kill(rank, signal.SIGKILL)
    until(lambda: shared_runs.steps_done() > UPDATES // 3 and process.poll() is None, "the updates of a new rank")
    process.kill()
    shared_runs.wait(process)
    assert not (killed / "warm_start").exists()
    saved = {path.name for path in (killed / "warm_start_checkpoints").glob("step-*")}
    assert len(saved) == 2 and saved <= {f"step-{update:06d}" for update in range(8, UPDATES, 8)}
    shared_runs.succeed("resume", killed)
    assert weights(killed) == weights(run) and not (killed / "warm_start_checkpoints").exists()
    assert [row["step"] for row in rows(killed, "metrics.jsonl")] == list(range(-UPDATES, 1))


def test_reinforcement_learning_begins_with_the_warm_starts_model(shared_runs: Runs) -> None:
    sections = settings(shared_runs, stop={"steps": 2}, algorithm={"uniform_groups": "train"})
    sections["model"]["lora"] = {"rank": 4}
    run = shared_runs.train(**sections)
    adapters = [
        (run / folder / "adapter_model.safetensors").read_bytes() for folder in ("warm_start/adapter", "adapter")
    ]
    assert adapters[0] != adapters[1]
    assert [row["step"] for row in rows(run, "metrics.jsonl")] == list(range(-UPDATES, 3))
    assert rows(run, "metrics.jsonl")[-1]["correction/logprob_gap_max"] < 1e-3
    replayed = shared_runs.succeed("replay", run)
    assert "equal" in replayed.out
    assert (run / "adapter/adapter_model.safetensors").read_bytes() == adapters[1]
