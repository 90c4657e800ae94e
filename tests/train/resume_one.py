"""One rank of a trainer that starts, or resumes from a checkpoint: the program of test_trainer_checkpoints.py.

python resume_one.py OUT.pt RANK PORT FROM TO FIRST LAST [KEY=VALUE ...]

FROM: a checkpoint's folder, or `-`. TO: where to save a checkpoint before the last step, or `-`; with it the model is
saved in OUT.pt.saved. Trains the steps from FIRST to LAST. Saves the weights at FROM, at TO and after the last step.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
from train_one import SPEC, batch

from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.train import deepspeed_engine as ds
from asyncrl_cli.train import worker as workers
from asyncrl_cli.train.model.lora import gathered

SUB_GROUP = 20_000
"""Elements of one part of ZeRO-3's optimizer: few, because the small model must have several parts, like large ones."""


def main() -> None:
    out, rank, port, source, target, first, last, *overrides = sys.argv[1:]
    spec = load_spec(SPEC, [f"runs_dir={Path(out).parent}", *overrides]).spec
    os.environ.update(ds.trainer_environment(spec))
    import torch

    from asyncrl_cli.train.model.initial import build_initial_model
    from asyncrl_cli.weights.mapped import MappedReplica
    from asyncrl_cli.weights.replica import Replica

    settings = ds.deepspeed_settings

    def with_small_parts(*arguments: Any, **named: Any) -> dict[str, Any]:
        made = settings(*arguments, **named)
        made["zero_optimization"]["sub_group_size"] = SUB_GROUP
        return made

    ds.deepspeed_settings = with_small_parts
    folder = Path(f"{out}.model")
    assert spec.model.init is not None
    build_initial_model(spec.model.init, spec.model.max_length, spec.seed, folder)
    workers.redirect_output = lambda *_: None  # the test reports the error
    worker = workers.TrainerWorker(spec, str(Path(out).parent))
    worker._rank = int(rank)
    worker.start(str(folder), "127.0.0.1", int(port), None if source == "-" else source, ".")
    # Not the initial state of every process: otherwise equal random numbers later would prove nothing.
    if source == "-":
        for state in (random, np.random):
            state.seed(1000 + int(rank))
        torch.manual_seed(2000 + int(rank))

    def weights() -> dict[str, Any]:
        named = list(worker._model.named_parameters())
        with gathered([parameter for _, parameter in named], spec.trainer.zero_stage):
            return {name: parameter.detach().clone() for name, parameter in named}

    steps = range(int(first), int(last) + 1)
    for step in steps[:-1]:
        worker.train_step(batch(step, spec.pipeline.groups_per_step))
    if target != "-":
        worker.save_checkpoint(target, spec.trainer.ranks)
        worker.save_model(f"{out}.saved", f"{out}.adapter")
    replica = Replica(worker.layout(), spec.trainer.ranks)
    path = replica.begin(0)
    worker.write(0, [path] * spec.trainer.ranks)
    with MappedReplica(worker.layout()).open(path, 0) as tensors:
        published = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in published.values():  # elements of other ranks are 0 here
        torch.distributed.all_reduce(tensor)
    result = {
        "published": published,
        "updates": worker._updates,
        "draws": (random.random(), np.random.random(), torch.rand(1).item()),
        "weights": weights(),
        "probe": worker._probe(()),
    }
    worker.train_step(batch(steps[-1], spec.pipeline.groups_per_step))
    if target != "-":  # after a step that changed everything that was saved
        worker.write_checkpoint(target)
    torch.save({**result, "weights_after": weights()}, out)


if __name__ == "__main__":
    main()
