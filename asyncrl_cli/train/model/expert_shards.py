"""Reads the weights of a checkpoint whose experts DeepSpeed's AutoEP has divided: DeepSpeed's own reader refuses it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.runs.checkpoints import TrainerLayout
from asyncrl_cli.train.model.expert_parallel import model_name
from asyncrl_cli.weights.layout import share_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """A weight that is in the shards of all ranks. It is read into memory by ``contiguous``."""

    shape: tuple[int, ...]  # of a half
    halves: list[list[Tensor]]
    """The experts' gate and up projection, which are one weight in the model; one half for any other weight. Each is in
    flat pieces, in the order of its elements; the last piece may be padded."""

    def contiguous(self) -> Tensor:
        """The full weight, float32: of each expert the rows of the first half, then those of the second."""
        import torch

        numel = prod(self.shape)
        halves = [torch.cat(pieces)[:numel].view(self.shape) for pieces in self.halves]
        return halves[0] if len(halves) == 1 else torch.cat(halves, dim=1)


def undivided(folder: Path, saved: TrainerLayout) -> dict[str, Any]:
    """The optimizer's own weights, float32, by the names that the undivided model has in a policy.

    ``folder`` has DeepSpeed's shards, of ZeRO-3. Raises what torch does when they cannot be read.
    """
    pieces: dict[str, dict[int, Tensor]] = defaultdict(dict)
    shapes: dict[str, tuple[int, ...]] = {}
    first = _read(folder, 0, "model")  # alone has which weights are tied
    for rank in range(saved.ranks):
        model = first if rank == 0 else _read(folder, rank, "model")
        optimizer = _read(folder, rank, "optim")["optimizer_state_dict"]
        parts = model["param_shapes"], optimizer["fp32_flat_groups"], optimizer["ds_zero_partition_groups"]
        for names, flat, partition in zip(*parts, strict=True):
            start = 0
            for name, shape in names.items():
                share = -(-prod(shape) // partition["partition_count"])
                pieces[name][rank], shapes[name] = flat[start : start + share], tuple(shape)
                start += share
    state: dict[str, Any] = {name: first["module"][name] for name in first["buffer_names"]}
    for name in sorted(pieces):  # w1 before w3
        groups = saved.expert_parallel if ".mlp.experts.w" in name else 1
        shares = {share_of(rank, saved.ranks, groups): piece for rank, piece in pieces[name].items()}
        shape = (shapes[name][0] * groups, *shapes[name][1:])
        joined = state.setdefault(model_name(name), Joined(shape, []))
        joined.halves.append([piece for _, piece in sorted(shares.items())])
    state |= {name: state[other] for name, other in first["shared_params"].items()}
    return {model_name(name): weight for name, weight in state.items()}


def _read(folder: Path, rank: int, kind: str) -> dict[str, Any]:
    import torch

    # With bfloat16 weights the optimizer's file begins with bf16_.
    (path,) = folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt")
    read: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True)
    return read
