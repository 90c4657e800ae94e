"""Finds changes of a spec with which a run fits: each is tried, and the estimate made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import lcm
from typing import Any

from asyncrl_cli.sizing.estimate import Estimate, Excess, excesses
from asyncrl_cli.sizing.parts import GB
from asyncrl_cli.sizing.trainer import largest_microbatch
from asyncrl_cli.spec.sections import ExperimentSpec

SHOWN = 3
"""The most changes that are named."""


class Change(dict[str, Any]):
    """Keys of a spec, with dots, and their new values."""

    def __str__(self) -> str:
        return " and ".join(f"{key} to {_yaml(value)}" for key, value in self.items())


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change with which the run fits on a device. ``nbytes``: what the run then takes there; None for an engine's
    GPU, where the cache takes all that is left."""

    change: Change
    nbytes: int | None

    def __str__(self) -> str:
        return f"{self.change} ({self.nbytes / GB:.1f} GB)" if self.nbytes is not None else str(self.change)


def remedies(
    spec: ExperimentSpec, excess: Excess, again: Callable[[ExperimentSpec], Estimate], kv_heads: int
) -> list[Remedy]:
    """At most ``SHOWN`` changes with each of which the run fits on the device, the best first.

    A change that is not enough is tried together with those before it that were not enough either. ``again`` makes an
    estimate; ``kv_heads`` are the model's key-value heads.
    """
    found = []
    tried = Change()
    for change in _changes(spec, excess.device.role, kv_heads):
        for attempt in (change, Change(tried | change)):
            remedy = _tried(excess, attempt, spec, again)
            if remedy is not None:
                found.append(remedy)
                break
        else:
            tried |= change
        if len(found) == SHOWN:
            break
    return found


def _tried(
    excess: Excess, change: Change, spec: ExperimentSpec, again: Callable[[ExperimentSpec], Estimate]
) -> Remedy | None:
    changed = with_changes(spec, change)
    result = again(changed)
    if any(
        (problem.device.role == excess.device.role and problem.device.name == excess.device.name)
        or (problem.cannot and problem.device.role == "engine" and "rollout.gpus_per_engine" in change)
        for problem in excesses(changed, result)
    ):
        return None
    device = next((device for device in result.devices if device.name == excess.device.name), None)
    return Remedy(change, device.total if device is not None and device.role != "engine" else None)


def _changes(spec: ExperimentSpec, role: str, kv_heads: int) -> Iterator[Change]:
    if role == "engine":
        yield from _engine_changes(spec)
    elif role == "both":
        yield from _shared_changes(spec, kv_heads)
    elif role == "host":
        yield from _host_changes(spec, kv_heads)
    else:
        yield from _trainer_changes(spec, kv_heads)


def _trainer_changes(spec: ExperimentSpec, kv_heads: int) -> Iterator[Change]:
    trainer = spec.trainer
    if not trainer.gradient_checkpointing:
        yield Change({"trainer.gradient_checkpointing": True})
    if trainer.zero_stage < 3 and trainer.ranks > 1:
        yield Change({"trainer.zero_stage": 3})
    rows, length, _ = largest_microbatch(spec)
    if rows > 1:
        tokens = max(length, trainer.tokens_per_microbatch // 2 // length * length)
        yield Change({"trainer.tokens_per_microbatch": tokens})
        if tokens > length:
            yield Change({"trainer.tokens_per_microbatch": length})
    experts_divided = trainer.expert_parallel > 1
    if trainer.offload == "none" and trainer.gpus_per_rank and trainer.zero_stage and not experts_divided:
        yield Change({"trainer.offload": "optimizer"})
    if trainer.attention != "eager" and not experts_divided:
        for size in (2 * trainer.sequence_parallel, 4 * trainer.sequence_parallel):
            if trainer.ranks % size == 0 and kv_heads % size == 0:
                yield Change({"trainer.sequence_parallel": size})
    for ranks in (2 * trainer.ranks, 4 * trainer.ranks):
        yield Change({"trainer.ranks": ranks})
    if trainer.dtype == "float32" and trainer.gpus_per_rank:
        yield Change({"trainer.dtype": "bfloat16", "rollout.dtype": "bfloat16"})


def _shared_changes(spec: ExperimentSpec, kv_heads: int) -> Iterator[Change]:
    """Changes that lower the states of a rank, or an engine's share of their GPU."""
    of_states = {"trainer.zero_stage", "trainer.offload", "trainer.dtype"}
    yield from (change for change in _trainer_changes(spec, kv_heads) if change.keys() & of_states)
    share = spec.rollout.gpus_per_engine
    yield from (Change({"rollout.gpus_per_engine": tenths / 10}) for tenths in range(9, 0, -1) if tenths / 10 < share)


def _engine_changes(spec: ExperimentSpec) -> Iterator[Change]:
    rollout = spec.rollout
    if spec.model.max_length > rollout.longest_rollout:
        yield Change({"model.max_length": rollout.longest_rollout})
    for factor in (2, 4, 8):
        if rollout.gpus_per_engine >= 1 and rollout.gpus_per_engine * factor <= spec.cluster.gpus_per_host:
            yield Change({"rollout.gpus_per_engine": int(rollout.gpus_per_engine) * factor})
    running = rollout.max_running_rollouts
    while running > rollout.group_size:
        running //= 2
        yield Change({"rollout.max_running_rollouts": running})


def _host_changes(spec: ExperimentSpec, kv_heads: int) -> Iterator[Change]:
    rollout, trainer = spec.rollout, spec.trainer
    if not rollout.gpus_per_engine:
        if spec.model.max_length > rollout.longest_rollout:
            yield Change({"model.max_length": rollout.longest_rollout})
        running = rollout.max_running_rollouts
        while running > rollout.group_size and rollout.kv_cache_mb is None:
            running //= 2
            yield Change({"rollout.max_running_rollouts": running})
    if not trainer.gpus_per_rank:
        yield from (c for c in _trainer_changes(spec, kv_heads) if "trainer.ranks" not in c)
        if trainer.ranks > 1 and trainer.ranks // 2 % lcm(trainer.sequence_parallel, trainer.expert_parallel) == 0:
            yield Change({"trainer.ranks": trainer.ranks // 2})
    elif trainer.offload == "all":
        yield Change({"trainer.offload": "optimizer"})
    elif trainer.offload == "optimizer":
        yield Change({"trainer.offload": "none"})
    if rollout.max_engines > 1 and not rollout.gpus_per_engine:
        yield Change({"rollout.engines": rollout.max_engines // 2})
    if rollout.dtype == "float32":
        yield Change({"rollout.dtype": "bfloat16", "trainer.dtype": "bfloat16"})


def with_changes(spec: ExperimentSpec, change: Change) -> ExperimentSpec:
    """The spec with these values, which are not validated again."""
    for key, value in change.items():
        section, name = key.split(".")
        part = getattr(spec, section).model_copy(update={name: value})
        spec = spec.model_copy(update={section: part})
    return spec


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
