"""The program of test_supervised.py: supervised updates with one setting after the other.

The result has each setting's losses, and its weights after the last update.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ranks import Rank

from asyncrl_cli.records.training import SupervisedBatch
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.deepspeed_engine import start_engine
from asyncrl_cli.train.model.lora import full_weights


def main(rank: Rank, batches: list[SupervisedBatch]) -> list[dict[str, Any]]:
    rank.join()
    return [train(spec, batches, rank.number) for spec in rank.specs]


def train(spec: ExperimentSpec, batches: list[SupervisedBatch], rank: int) -> dict[str, Any]:
    from asyncrl_cli.train.algorithms.objective import Objective
    from asyncrl_cli.train.nonfinite_guard import SkipLimit
    from asyncrl_cli.train.precompute import Learner
    from asyncrl_cli.train.supervised import train_rows

    engine = start_engine(spec, str(spec.model.path))
    learner = Learner(
        spec, rank, Objective.of(spec.algorithm, Path()), engine, SkipLimit(0), vision=engine.module.vision
    )
    losses = [train_rows(learner, batch).metrics["warm_start/loss"] for batch in batches]
    state = {
        weight.name: weight.merged().clone() for weight in full_weights(engine.module.model, spec.trainer.zero_stage)
    }
    engine.destroy()
    return {"losses": losses, "weights": state}
