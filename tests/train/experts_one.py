"""One of four ranks that divide the experts of small models: the program of test_expert_parallel.py.

python experts_one.py OUT.pt RANK PORT [KEY=VALUE ...]

Saves, for each setting, the gradients' norms, the final weights, and this rank's elements of them as engines get them;
rank 0 also saves the results of one process without DeepSpeed.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

from sequence_one import ROUTED, SMALL
from train_one import SPEC

from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train import deepspeed_engine as ds
from asyncrl_cli.train.model.lora import full_weights
from asyncrl_cli.train.nonfinite_guard import backward, step

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": ROUTED | {"num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("qwen3_moe", "in two parts, recomputed"): {"expert_parallel": 2, "gradient_checkpointing": True},
    ("mixtral", "in four parts"): {"expert_parallel": 4},
}
"""Settings of four ranks. With two parts, two ranks have the same experts."""
UPDATES = 3


def main() -> None:
    out, rank, port, *overrides = sys.argv[1:]
    spec = load_spec(SPEC, [f"runs_dir={Path(out).parent}", "model.warm_start=null", *overrides]).spec
    os.environ.update(ds.trainer_environment(spec))
    import torch

    torch.set_num_threads(1)
    folders = {name: Path(f"{out}.{name}") for name in ARCHITECTURES}
    for name, folder in folders.items():  # before ranks join: afterwards only rank 0 would write it
        build(name, folder)
    ds.join_process_group(int(rank), spec.trainer.ranks, "127.0.0.1", int(port), gpu=False)
    results: dict[Any, Any] = {}
    for (name, kind), change in SETTINGS.items():
        changed = spec.model_copy(update={"trainer": spec.trainer.model_copy(update=change)})
        results[name, kind] = train(changed, folders[name], int(rank))
    if int(rank) == 0:
        results |= {name: by_hand(spec, folder) for name, folder in folders.items()}
    torch.save(results, out)


def build(name: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SMALL | ARCHITECTURES[name])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def rows(rank: int) -> tuple[Any, Any, Any]:
    """Ids, mask and the weight of every token in the loss, the same for every update. The last rank has two tokens, so
    that some experts get none of its tokens."""
    import torch

    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, 90, (3, 12) if rank < 3 else (1, 3), generator=generator)
    mask = torch.rand(ids.shape, generator=generator) < 0.6
    mask[:, 0], mask[:, 1] = False, True
    return ids, mask, torch.randn(ids.shape, generator=generator)


def train(spec: ExperimentSpec, folder: Path, rank: int) -> dict[str, Any]:
    import torch

    from asyncrl_cli.train.shards import engine_layout, shards, write_shard
    from asyncrl_cli.weights.mapped import Copies

    engine, ranks = ds.start_engine(spec, str(folder)), spec.trainer.ranks
    model = engine.module.model
    ids, mask, weights = rows(rank)
    norms = []
    for update in range(UPDATES + 1):
        engine.set_gradient_accumulation_boundary(True)
        logprobs = engine(ids, mask)
        loss = (logprobs * weights).sum()
        if update == UPDATES and rank == ranks - 1:
            loss = loss + math.inf  # not finite on one rank: no rank may make this update
        backward(engine, loss)
        made = step(engine)
        assert made.skipped == (update == UPDATES)
        norms.append(made.norm)
    layout = engine_layout(model, torch.float32)
    memory = {slot.name: torch.full(slot.shape, torch.nan) for slot in layout}
    for name, begin, own in shards(model, rank, ranks, zero_stage=3):
        write_shard(memory[name], begin, own, Copies())
    full = {weight.name: weight.merged().clone() for weight in full_weights(model, zero_stage=3)}
    engine.destroy()
    return {"norms": norms[:UPDATES], "layout": layout, "memory": memory, "full": full}


def by_hand(spec: ExperimentSpec, folder: Path) -> dict[str, Any]:
    """The same updates by autograd and torch's optimizer, on a model that is not divided."""
    import torch
    from transformers import AutoModelForCausalLM

    from asyncrl_cli.train.model.policy import Policy

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = Policy(model, spec.rollout.sampling.temperature)
    settings, ranks = spec.trainer.optimizer, spec.trainer.ranks
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    norms = []
    for _ in range(UPDATES):
        optimizer.zero_grad()
        for rank in range(ranks):
            ids, mask, weights = rows(rank)
            ((policy(ids, mask) * weights).sum() / ranks).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm).item())
        optimizer.step()
    return {"norms": norms, "full": {name: tensor.detach() for name, tensor in model.state_dict().items()}}


if __name__ == "__main__":
    main()
