"""Mixtures of experts, with the experts divided over ranks by DeepSpeed's AutoEP (decision 0055).

AutoEP replaces a layer's mixture while the engine is made. The gate and up projections of a rank's experts become two
weights (``w1`` and ``w3``), and names change. Everything outside the engine uses the transformers model's names and
shapes: ``own_names`` translates, and no other module knows AutoEP's layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.runs.checkpoints import TrainerLayout
from asyncrl_cli.spec.rules.model import DIVIDED
from asyncrl_cli.spec.sections import TrainerSpec
from asyncrl_cli.weights.layout import share_of

MIXTURES = r".*layers\.\d+\.mlp"
"""AutoEP's pattern for the modules that it may replace, below any prefix."""

NAMES = {
    "experts.w1": "experts.gate_up_proj",
    "experts.w3": "experts.gate_up_proj",
    "experts.w2": "experts.down_proj",
    "router.gate.": "gate.",
}
"""AutoEP's names in a mixture, and transformers' names. ``w1`` has an expert's first rows, ``w3`` the rest."""


class ExpertError(ConfigError):
    """The model's experts cannot be divided over ranks."""

    def __init__(self, reason: str, hint: str = "set it to 1, or use another model") -> None:
        super().__init__(reason, location="trainer.expert_parallel", hint=hint)


def expert_settings(trainer: TrainerSpec) -> dict[str, Any]:
    """Return DeepSpeed's configuration of AutoEP; empty if experts are not divided."""
    if trainer.expert_parallel == 1:
        return {}
    # torch's grouped matrix product needs bfloat16 on GPUs; otherwise experts are computed one after another.
    grouped = bool(trainer.gpus_per_rank) and trainer.dtype == "bfloat16"
    settings = {"autoep_size": trainer.expert_parallel, "moe_layer_pattern": MIXTURES, "use_grouped_mm": grouped}
    return {"expert_parallel": {"enabled": True, **settings}}


def check_experts(config: Any, trainer: TrainerSpec) -> None:
    """Raise ``ExpertError`` when ``trainer`` cannot divide the experts of a model with this config."""
    if trainer.expert_parallel == 1:
        return
    model_type = config.model_type
    if model_type not in DIVIDED:
        hint = f"set it to 1; it is for mixtures of experts: {', '.join(DIVIDED)}"
        raise ExpertError(f"the experts of {model_type} cannot be divided among ranks", hint)
    if config.hidden_act != "silu":
        raise ExpertError(f"the experts of this {model_type} are activated by {config.hidden_act}, and not by silu")
    # Every rank must have whole experts: its part is then one piece of the model's weight.
    if (expert_count := getattr(config, DIVIDED[model_type])) % trainer.ranks:
        reason = f"{expert_count} experts cannot be divided evenly among {trainer.ranks} ranks"
        raise ExpertError(reason, "lower trainer.ranks to a divisor, or set it to 1")


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """One weight of all experts in a layer: one tensor in the transformers model, of which this rank has a piece."""

    layer: Any  # AutoEP's
    halves: tuple[nn.Parameter, ...]
    """AutoEP's weights: gate and up, or only down. Each is [this rank's experts, rows, columns], and sharded over the
    ranks that have the same experts."""

    @property
    def groups(self) -> int:
        """Number of parts into which the experts are divided before they are sharded (``share_of``)."""
        return int(self.layer.ep_size)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of all experts, rows and columns of each."""
        shapes = [tuple(half.ds_shape) for half in self.halves]  # type: ignore[attr-defined]
        return int(self.layer.num_experts), sum(rows for _, rows, _ in shapes), shapes[0][2]

    def local_elements(self) -> Tensor:
        """Return this rank's piece by ``share_of``, [elements]: whole experts."""
        halves = [
            half.ds_tensor.detach().view(-1, *half.ds_shape[1:])  # type: ignore[attr-defined]
            for half in self.halves
        ]
        return (halves[0] if len(halves) == 1 else torch.cat(halves, dim=1)).reshape(-1)

    def gathered(self) -> Tensor:
        """Gather the full weight in a new tensor; collective over all ranks."""
        elements, ranks = self.local_elements(), torch.distributed.get_world_size()
        full = elements.new_empty(self.shape)
        shares = full.view(ranks, -1)
        torch.distributed.all_gather([shares[share_of(rank, ranks, self.groups)] for rank in range(ranks)], elements)
        return full


def divided_layers(model: nn.Module) -> dict[str, Any]:
    """Return a model's AutoEP layers by name."""
    return {name: module for name, module in model.named_modules() if getattr(module, "_is_autoep_layer", False)}


def model_name(name: str) -> str:
    """Return the name of the transformers model's weight that contains an AutoEP layer's weight ``name``. Other names
    are returned unchanged."""
    for autoep_name, name_in_model in NAMES.items():
        name = name.replace(f".mlp.{autoep_name}", f".mlp.{name_in_model}")
    return name


def own_names(layers: dict[str, Any], name: str) -> Iterator[tuple[str, RoutedExperts | None]]:
    """Translate the weight ``name`` of a model with AutoEP ``layers``. Yield its name in the transformers model, and,
    for divided experts, the full weight.

    If the full weight has two parts (``w1`` and ``w3``), it is yielded for the first part, and nothing for the second.
    """
    owner, _, leaf = name.rpartition(".experts.")
    if owner not in layers:
        yield model_name(name) if layers else name, None
    elif leaf != "w3":
        experts = layers[owner].experts
        halves = (experts.w1, experts.w3) if leaf == "w1" else (experts.w2,)
        yield model_name(name), RoutedExperts(layers[owner], halves)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """A weight in the shards of all ranks. ``contiguous`` reads it into memory."""

    shape: tuple[int, ...]  # a half's shape
    halves: list[list[Tensor]]
    """The experts' gate and up projections, which are one weight in the model; one half for any other weight. Each is
    in flat pieces, in the order of its elements; the last piece may be padded."""

    def contiguous(self) -> Tensor:
        """Return the full weight, float32: for each expert the first half's rows, then the second half's."""
        numel = prod(self.shape)
        halves = [torch.cat(shards)[:numel].view(self.shape) for shards in self.halves]
        return halves[0] if len(halves) == 1 else torch.cat(halves, dim=1)


def undivided(folder: Path, saved: TrainerLayout) -> dict[str, Any]:
    """Return the optimizer's float32 weights, by the names of the undivided model in a policy.

    ``folder`` has DeepSpeed's ZeRO-3 shards. Raises torch's error when they cannot be read.
    """
    shards: dict[str, dict[int, Tensor]] = defaultdict(dict)
    shapes: dict[str, tuple[int, ...]] = {}
    model_of_rank_0 = _load_states(folder, 0, "model")  # only this file names tied weights
    for rank in range(saved.ranks):
        model = model_of_rank_0 if rank == 0 else _load_states(folder, rank, "model")
        optimizer = _load_states(folder, rank, "optim")["optimizer_state_dict"]
        group_lists = model["param_shapes"], optimizer["fp32_flat_groups"], optimizer["ds_zero_partition_groups"]
        for names, flat, partition in zip(*group_lists, strict=True):
            start = 0
            for name, shape in names.items():
                share = -(-prod(shape) // partition["partition_count"])
                shards[name][rank], shapes[name] = flat[start : start + share], tuple(shape)
                start += share
    state: dict[str, Any] = {name: model_of_rank_0["module"][name] for name in model_of_rank_0["buffer_names"]}
    for name in sorted(shards):  # w1 before w3
        groups = saved.expert_parallel if ".mlp.experts.w" in name else 1
        shares = {share_of(rank, saved.ranks, groups): shard for rank, shard in shards[name].items()}
        shape = (shapes[name][0] * groups, *shapes[name][1:])
        joined = state.setdefault(model_name(name), Joined(shape, []))
        joined.halves.append([shard for _, shard in sorted(shares.items())])
    state |= {name: state[tied_name] for name, tied_name in model_of_rank_0["shared_params"].items()}
    return {model_name(name): weight for name, weight in state.items()}


def _load_states(folder: Path, rank: int, file_kind: str) -> dict[str, Any]:
    # With bfloat16 weights the optimizer's file begins with bf16_.
    (path,) = folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_{file_kind}_states.pt")
    states: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True)
    return states
