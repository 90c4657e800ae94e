"""Supervised updates with one setting after the other: the program of test_supervised.py.

python supervised_one.py OUT.pt RANK PORT MODEL ROWS.pt [KEY=VALUE ...] [, KEY=VALUE ...]

ROWS.pt has a list of ``SupervisedBatch``. Saves each setting's losses, and its weights after the last update.
"""

from __future__ import annotations

import os
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from train_one import SPEC

from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.deepspeed_engine import join_process_group, start_engine, trainer_environment
from asyncrl_cli.train.model.lora import full_weights


def main() -> None:
    out, rank, port, model, rows, *overrides = sys.argv[1:]
    settings = [list(group) for is_comma, group in groupby(overrides, ",".__eq__) if not is_comma]
    usual = [f"runs_dir={Path(out).parent}", "model.init=null", f"model.path={model}"]
    specs = [load_spec(SPEC, usual + setting).spec for setting in settings]
    os.environ.update(trainer_environment(specs[0]))
    import torch

    torch.set_num_threads(1)
    join_process_group(int(rank), specs[0].trainer.ranks, "127.0.0.1", int(port), gpu=False)
    batches = torch.load(rows, weights_only=False)
    torch.save([train(spec, model, batches, int(rank)) for spec in specs], out)


def train(spec: ExperimentSpec, folder: str, batches: Any, rank: int) -> dict[str, Any]:
    from asyncrl_cli.train.algorithms.objective import Objective
    from asyncrl_cli.train.nonfinite_guard import SkipLimit
    from asyncrl_cli.train.precompute import Learner
    from asyncrl_cli.train.supervised import train_rows

    engine = start_engine(spec, folder)
    learner = Learner(
        spec, rank, Objective.of(spec.algorithm, Path()), engine, SkipLimit(0), vision=engine.module.vision
    )
    losses = [train_rows(learner, batch).metrics["warm_start/loss"] for batch in batches]
    state = {
        weight.name: weight.merged().clone() for weight in full_weights(engine.module.model, spec.trainer.zero_stage)
    }
    engine.destroy()
    return {"losses": losses, "weights": state}


if __name__ == "__main__":
    main()
