"""The program of test_zero_engines.py: a rank trains the same small model by engines of several settings.

The result has, for each setting, the results of every update, the gradient's norm by autograd, and the final weights.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from ranks import Rank

from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train import deepspeed_engine as ds
from asyncrl_cli.train.model import chunked_logprobs
from asyncrl_cli.train.model.lora import gathered
from asyncrl_cli.train.nonfinite_guard import backward, step

SETTINGS = [
    *({"zero_stage": stage, "dtype": dtype} for dtype in ("float32", "bfloat16") for stage in range(4)),
    {"zero_stage": 2, "dtype": "float32", "offload": "optimizer"},
    {"zero_stage": 3, "dtype": "float32", "offload": "all"},
]
MICROBATCHES = 2


def main(rank: Rank) -> dict[Any, Any]:
    from asyncrl_cli.train.model.initial import build_initial_model

    chunked_logprobs.CHUNK_NUMBERS = 500  # every pass has several chunks
    spec, folder = rank.spec, Path(f"{rank.out}.model")
    assert spec.model.init is not None
    build_initial_model(spec.model.init, spec.model.max_length, spec.seed, folder)
    rank.join()
    results: dict[Any, Any] = {}
    norm = norm_by_hand(spec, folder)
    for setting in SETTINGS:
        changed = with_trainer(spec, **setting)
        results[tuple(setting.values())] = {
            "spoilt": train(changed, folder, rank.number, ["good", "loss", "good", "gradient", "good"]),
            "good": train(changed, folder, rank.number, ["good"] * 3),
            "norm": norm,
        }
    slow = spec.trainer.optimizer.model_copy(update={"learning_rate": 1e-4})
    for stage in range(4):
        changed = with_trainer(spec, zero_stage=stage, dtype="bfloat16", optimizer=slow)
        results["slow", stage] = train(changed, folder, rank.number, ["good"] * 7, keep=(0, 1))
    for stage in (2, 3):
        changed = with_trainer(spec, zero_stage=stage, dtype="bfloat16")
        results["summed", stage] = summed(changed, folder, rank.number)
    return results


def with_trainer(spec: ExperimentSpec, **changes: Any) -> ExperimentSpec:
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update=changes)})


def rows(rank: int, microbatch: int) -> tuple[Any, Any, Any]:
    """Ids, mask and the weight of every token in the loss, the same for every update."""
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    ids = torch.randint(3, 90, (3 + rank, 12), generator=generator)
    mask = torch.rand(ids.shape, generator=generator) < 0.6
    mask[:, 0] = False
    return ids, mask, torch.randn(ids.shape, generator=generator)


def train(
    spec: ExperimentSpec, folder: Path, rank: int, updates: list[str], keep: tuple[int, ...] = ()
) -> dict[str, Any]:
    """The result of each update, and the weights at the end and after ``keep`` updates."""
    engine = ds.start_engine(spec, str(folder))
    last = spec.trainer.ranks - 1
    made: list[Any] = []
    kept = {}
    for kind in updates:
        if len(made) in keep:
            kept[len(made)] = weights_of(engine, spec)
        before = state(engine)
        for microbatch in range(MICROBATCHES):
            engine.set_gradient_accumulation_boundary(microbatch == MICROBATCHES - 1)
            ids, mask, weights = rows(rank, microbatch)
            logprobs = engine(ids, mask)
            loss = (logprobs * weights).sum()
            if kind == "loss" and rank == last and microbatch == 0:
                loss = loss + math.inf  # its gradient is the same as before
            if kind == "gradient" and rank == last and microbatch == 1:
                loss = loss + (0 * logprobs).abs().sqrt().sum()  # the loss is 0, with a gradient of NaN
            backward(engine, loss)
        result = step(engine)
        after = state(engine)
        same = len(before) == len(after) and all(one.equal(other) for one, other in zip(before, after, strict=True))
        made.append((kind, result, same))
    weights = weights_of(engine, spec)
    dtypes = {parameter.dtype for parameter in engine.basic_optimizer.state}
    engine.destroy()
    return {"updates": made, "weights": weights, "kept": kept, "optimized": dtypes}


def summed(spec: ExperimentSpec, folder: Path, rank: int) -> float:
    """How far the gradient that ranks have added up is from a sum in float64 of the same bfloat16 gradients, relative
    to its norm."""
    from deepspeed.utils import safe_get_full_grad

    from asyncrl_cli.train.model.policy import Policy

    ids, mask, weights = rows(rank, 0)
    plain = Policy(ds.load_model(spec.trainer.model_copy(update={"zero_stage": 0}), str(folder)), 1.0)
    (plain(ids, mask) * weights).sum().backward()
    engine = ds.start_engine(spec, str(folder))
    engine.module.temperature = 1.0
    engine.set_gradient_accumulation_boundary(True)
    backward(engine, (engine(ids, mask) * weights).sum())
    squares = torch.zeros(2, dtype=torch.float64)
    for own, shared in zip(plain.parameters(), engine.module.parameters(), strict=True):
        assert own.grad is not None
        exact = own.grad.double()
        torch.distributed.all_reduce(exact)
        exact /= spec.trainer.ranks
        found = safe_get_full_grad(shared).double()
        squares += torch.stack([(found - exact).square().sum(), exact.square().sum()])
    engine.destroy()
    return float((squares[0] / squares[1]).sqrt())


def weights_of(engine: Any, spec: ExperimentSpec) -> dict[str, Any]:
    named = list(engine.module.model.named_parameters())
    with gathered([parameter for _, parameter in named], spec.trainer.zero_stage):
        return {name: parameter.detach().clone() for name, parameter in named}


def state(engine: Any) -> list[Any]:
    """The state of the optimizer on this rank: the weights that it updates, its moments and counters."""
    owned = [
        tensor.detach().clone()
        for parameter, moments in engine.basic_optimizer.state.items()
        for tensor in (parameter, *moments.values())
    ]
    return [*owned, *(getattr(each, "ds_tensor", each).detach().clone() for each in engine.module.parameters())]


def norm_by_hand(spec: ExperimentSpec, folder: Path) -> float:
    """The norm of the first update's gradient, by autograd on a model that is not sharded."""
    from transformers import AutoModelForCausalLM

    from asyncrl_cli.train.model.policy import Policy

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = Policy(model, spec.rollout.sampling.temperature)
    for rank in range(spec.trainer.ranks):
        for microbatch in range(MICROBATCHES):
            ids, mask, weights = rows(rank, microbatch)
            ((policy(ids, mask) * weights).sum() / spec.trainer.ranks).backward()
    squares = sum(each.grad.double().square().sum().item() for each in policy.parameters() if each.grad is not None)
    return float(squares**0.5)
