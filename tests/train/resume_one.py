"""The program of test_trainer_checkpoints.py: a rank starts, or resumes from a checkpoint.

It trains the steps from ``first`` to ``last``. With ``target`` it saves a checkpoint there before the last step, and
the model in OUT.saved. The result has the weights before the last step and after it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import Rank
from train_one import batch

from asyncrl_cli.train import deepspeed_engine as ds
from asyncrl_cli.train import worker as workers
from asyncrl_cli.train.model.lora import gathered

SUB_GROUP = 20_000
"""Elements of one part of ZeRO-3's optimizer: few, because the small model must have several parts, like large ones."""


def optimizer_settings(engine: Any) -> tuple[float, float]:
    """Weight decay and clipping, as DeepSpeed uses them."""
    (weight_decay,) = {group["weight_decay"] for group in engine.optimizer.param_groups}
    return weight_decay, getattr(engine.optimizer, "clip_grad", engine.gradient_clipping())


def main(rank: Rank, source: Path | None, target: Path | None, first: int, last: int) -> dict[str, Any]:
    from asyncrl_cli.train.model.initial import build_initial_model
    from asyncrl_cli.weights.mapped import MappedReplica
    from asyncrl_cli.weights.replica import Replica

    settings = ds.deepspeed_settings

    def with_small_parts(*arguments: Any, **named: Any) -> dict[str, Any]:
        made = settings(*arguments, **named)
        made["zero_optimization"]["sub_group_size"] = SUB_GROUP
        return made

    ds.deepspeed_settings = with_small_parts
    spec, folder = rank.spec, Path(f"{rank.out}.model")
    assert spec.model.init is not None
    build_initial_model(spec.model.init, spec.model.max_length, spec.seed, folder)
    workers.redirect_output = lambda *_: None  # the test reports the error
    worker = workers.TrainerWorker(spec, str(rank.folder))
    worker._rank = rank.number
    worker.start(str(folder), "127.0.0.1", rank.port, source and str(source), ".")
    # Not the initial state of every process: otherwise equal random numbers later would prove nothing.
    if source is None:
        for state in (random, np.random):
            state.seed(1000 + rank.number)
        torch.manual_seed(2000 + rank.number)

    def weights() -> dict[str, Any]:
        named = list(worker._model.named_parameters())
        with gathered([parameter for _, parameter in named], spec.trainer.zero_stage):
            return {name: parameter.detach().clone() for name, parameter in named}

    for step in range(first, last):
        worker.train_step(batch(step, spec.pipeline.groups_per_step))
    if target is not None:
        worker.save_checkpoint(str(target), spec.trainer.ranks)
        worker.save_model(f"{rank.out}.saved", f"{rank.out}.adapter")
    replica = Replica(worker.layout(), spec.trainer.ranks)
    path = replica.begin(0)
    worker.write(0, [path] * spec.trainer.ranks)
    with MappedReplica(worker.layout()).open(path, 0) as tensors:
        published = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in published.values():  # elements of other ranks are 0 here
        torch.distributed.all_reduce(tensor)
    result = {
        "published": published,
        "updates": worker._engine.global_steps,
        "optimizer": optimizer_settings(worker._engine),
        "draws": (random.random(), np.random.random(), torch.rand(1).item()),
        "weights": weights(),
        "probe": worker._probe(()),
    }
    worker.train_step(batch(last, spec.pipeline.groups_per_step))
    if target is not None:  # after a step that changed everything that was saved
        worker.write_checkpoint(str(target))
    return {**result, "weights_after": weights()}
