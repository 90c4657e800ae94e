"""The program of test_expert_parallel.py: four ranks divide the experts of small models.

The result has, for each setting, the first log-probs, the gradients' norms, the final weights, and this rank's elements
of them as engines get them. Rank 0 also has the results of one process without DeepSpeed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from ranks import Rank
from sequence_one import ROUTED, SMALL

from asyncrl_cli.spec.rules.model import DIVIDED
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train import deepspeed_engine as ds
from asyncrl_cli.train.model.lora import full_weights
from asyncrl_cli.train.nonfinite_guard import backward, step

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": ROUTED | {"num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe, weights not normed": ROUTED | {"num_experts": 8, "norm_topk_prob": False},
}
SHARED = {"sequence_parallel": 2}
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("qwen3_moe", "in two parts, recomputed"): {"expert_parallel": 2, "gradient_checkpointing": True},
    ("mixtral", "in four parts"): {"expert_parallel": 4},
    ("qwen3_moe", "replayed, recomputed"): {"expert_parallel": 2, "gradient_checkpointing": True},
    ("qwen3_moe, weights not normed", "replayed, packed"): {"expert_parallel": 4, "packing": True},
    ("mixtral", "in four parts, shared sequences"): SHARED | {"expert_parallel": 4},
    ("qwen3_moe", "in two parts, shared sequences, replayed, packed, recomputed"): SHARED
    | {"expert_parallel": 2, "packing": True, "gradient_checkpointing": True},
    ("qwen3_moe", "in one part, shared sequences, replayed"): SHARED,
}
"""Settings of four ranks, first those without shared sequences: these change attention in the process for good. With
two parts, two ranks have the same experts."""
UPDATES = 3


def main(rank: Rank) -> dict[Any, Any]:
    folders = {name: Path(f"{rank.out}.{name}") for name in ARCHITECTURES}
    for name, folder in folders.items():
        build(name, folder)
    rank.join()
    results: dict[Any, Any] = {}
    specs = {setting: changed(rank.spec, setting) for setting in SETTINGS}
    if rank.number == 0:
        results |= {("by hand", *setting): by_hand(spec, folders[setting[0]]) for setting, spec in specs.items()}
    for setting, spec in specs.items():
        results[setting] = train(spec, folders[setting[0]], rank.number)
    return results


def changed(spec: ExperimentSpec, setting: tuple[str, str]) -> ExperimentSpec:
    trainer = spec.trainer.model_copy(update=SETTINGS[setting])
    algorithm = spec.algorithm.model_copy(update={"router_replay": "replayed" in setting[1]})
    return spec.model_copy(update={"trainer": trainer, "algorithm": algorithm})


def build(name: str, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name.partition(",")[0], **SMALL | ARCHITECTURES[name])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def number_of_experts(model: Any) -> int:
    return int(getattr(model.config, DIVIDED[model.config.model_type]))


def rows(spec: ExperimentSpec, group: int, experts: int) -> tuple[Any, dict[str, Any], Any]:
    """Ids and mask, recorded choices among ``experts`` where they are replayed, and the weight of every token in the
    loss, the same for every update. ``group``: of ranks that share sequences. The last one has two tokens: some experts
    get none of them.
    """
    last = spec.trainer.ranks // spec.trainer.sequence_parallel - 1
    generator = torch.Generator().manual_seed(group)
    ids = torch.randint(3, 90, (3, 12) if group < last else (1, 3), generator=generator)
    mask = torch.rand(ids.shape, generator=generator) < 0.6
    mask[:, 0], mask[:, 1] = False, True
    weights = torch.randn(ids.shape, generator=generator)
    chosen = torch.rand(*ids.shape, SMALL["num_hidden_layers"], experts, generator=generator).argsort(-1)[..., :2]
    known = (torch.arange(ids.shape[1]) % 3 > 0)[:, None]
    recorded = (chosen.flatten(2) * known).to(torch.uint8)
    return (ids, mask), {"experts": recorded} if spec.algorithm.router_replay else {}, weights


def train(spec: ExperimentSpec, folder: Path, rank: int) -> dict[str, Any]:
    from asyncrl_cli.train.shards import engine_layout, shards, write_shard
    from asyncrl_cli.weights.mapped import Copies

    engine, ranks = ds.start_engine(spec, str(folder)), spec.trainer.ranks
    model = engine.module.model
    size = spec.trainer.sequence_parallel
    inputs, recorded, weights = rows(spec, rank // size, number_of_experts(model))
    norms, scored = [], []
    for update in range(UPDATES + 1):
        engine.set_gradient_accumulation_boundary(True)
        logprobs = engine(*inputs, **recorded)
        scored.append(logprobs.detach())
        loss = (logprobs * weights).sum()
        if update == UPDATES and rank >= ranks - size:
            loss = loss + math.inf  # not finite in one group: no rank may make this update
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
    return {"scored": scored[0], "norms": norms[:UPDATES], "layout": layout, "memory": memory, "full": full}


def by_hand(spec: ExperimentSpec, folder: Path) -> dict[str, Any]:
    """The same updates by autograd and torch's optimizer, on a model that is not divided."""
    from transformers import AutoModelForCausalLM

    from asyncrl_cli.train.model.policy import Policy

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = Policy(model, spec.rollout.sampling.temperature, router_replay=spec.algorithm.router_replay)
    settings, ranks = spec.trainer.optimizer, spec.trainer.ranks
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    norms: list[float] = []
    scored: list[Any] = []  # of every group, in every update
    for _ in range(UPDATES):
        optimizer.zero_grad()
        for group in range(ranks // spec.trainer.sequence_parallel):
            inputs, recorded, weights = rows(spec, group, number_of_experts(model))
            scored.append(policy(*inputs, **recorded))
            ((scored[-1] * weights).sum() / ranks).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm).item())
        optimizer.step()
    logprobs = [each.detach() for each in scored]
    return {
        "scored": logprobs,
        "norms": norms,
        "full": {name: tensor.detach() for name, tensor in model.state_dict().items()},
    }
