"""Checks that a run fits into the memory of GPUs and hosts, and finds changes of its spec that make it fit.

`asyncrl validate-spec --memory` and `asyncrl train --dry-run` estimate all parts. A start leaves out activations,
because counting them takes seconds: its result is a lower bound, and a run is refused if even this is too large
(decision 0047).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import lcm

from asyncrl_cli.checks.finding import Result, Warned
from asyncrl_cli.checks.machine import nvidia_smi
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.sizing.estimate import Change, Estimate, Excess, estimate, excesses, with_changes
from asyncrl_cli.sizing.model import SizedModel
from asyncrl_cli.sizing.parts import GB, Device, Role, shown
from asyncrl_cli.sizing.trainer import largest_microbatch
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.memory import available_memory

SHOWN = 3
"""Largest number of changes in a hint."""


def check_memory_estimate(spec: ExperimentSpec, model: SizedModel, thorough: bool) -> Result:
    """Check that each GPU and host has the memory that the run needs. Raises ``ConfigError`` if not.

    ``thorough``: include the activations of a micro-batch.
    """
    if not thorough:
        model = replace(model, activations=lambda *_: 0)
    found = estimate_memory(spec, model)
    refused, warned = memory_problems(spec, model, found)
    if refused is not None:
        raise refused
    text = "\n".join(map(_line, found.devices))
    if not warned:
        return text
    return Warned("\n".join([text, *(one.found for one in warned)]), "; ".join(one.hint for one in warned if one.hint))


def _line(device: Device) -> str:
    of = f" of {shown(device.capacity)}" if device.capacity is not None else ""
    count = f"{device.count} × " if device.count > 1 else ""
    parts = sorted(device.parts, key=lambda part: -part.bytes)
    return f"{count}{device.name}: {shown(device.total)}{of} ({', '.join(f'{p.name} {shown(p.bytes)}' for p in parts)})"


def estimate_memory(spec: ExperimentSpec, model: SizedModel, gpu_bytes: int | None = None) -> Estimate:
    """Estimate a run's memory on GPUs of ``gpu_bytes``. None: take the size from the spec, or from this machine."""
    cluster = spec.cluster
    if gpu_bytes is None:
        gpu_bytes = int(cluster.gpu_memory_gb * GB) if cluster.gpu_memory_gb is not None else installed_gpu_memory()
    host_bytes = int(cluster.host_memory_gb * GB) if cluster.host_memory_gb is not None else None
    wants_gpus = spec.trainer.gpus_per_rank or spec.rollout.gpus_per_engine
    if host_bytes is None and cluster.address is None and (not wants_gpus or installed_gpu_memory() is not None):
        host_bytes = available_memory()
    return estimate(spec, model=model, gpu_bytes=gpu_bytes, host_bytes=host_bytes)


def memory_problems(
    spec: ExperimentSpec, model: SizedModel, found: Estimate
) -> tuple[ConfigError | None, list[Warned]]:
    """Return the first problem that makes every run fail, and the problems that may do so. Hints name changes."""
    refused, warned = None, []
    for problem in excesses(spec, found):
        again = partial(estimate_memory, model=model, gpu_bytes=problem.device.gpu)
        helpful = remedies(spec, excess=problem, again=again, kv_heads=model.kv_heads)
        hint = f"set {', or '.join(map(str, helpful))}" if helpful else ""
        if not problem.cannot:
            warned.append(Warned(problem.message, hint))
        elif refused is None:
            if problem.device.role is Role.HOST or not helpful:
                key, advice = _advice(spec, problem.device)
                hint = f"{advice}; {hint}" if hint else advice
            else:
                key = next(iter(helpful[0].change))
            message = f"the run does not fit into memory: {problem.message}"
            refused = ConfigError(message, location=key, hint=hint)
    return refused, warned


def installed_gpu_memory() -> int | None:
    """Return the bytes of this machine's smallest GPU, or None without GPUs."""
    answer = nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    try:
        return min((int(line) * 2**20 for line in answer.split()), default=None)
    except ValueError:
        return None


def _advice(spec: ExperimentSpec, device: Device) -> tuple[str, str]:
    """The key that decides the size of a device's largest part, and how to change it."""
    rollout = spec.rollout
    model = "model.init.config" if spec.model.init is not None else "model.path"
    largest = max(device.parts, key=lambda part: part.bytes).name
    if largest == "key-value caches":
        if rollout.kv_cache_mb is not None:
            return "rollout.kv_cache_mb", "lower it, or remove it"
        average = rollout.longest_rollout // 2
        if spec.model.max_length > rollout.max_running_rollouts * average:
            return "model.max_length", "lower it: the cache of each engine has room for one sequence of this length"
        return "rollout.max_running_rollouts", "lower it, or set rollout.kv_cache_mb"
    if largest == "processes":
        return "this machine", "stop other programs, or lower rollout.engines or trainer.ranks"
    return model, "use a smaller model, adapters (model.lora), a higher trainer.zero_stage, or fewer engines"


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that makes the run fit on a device.

    ``nbytes``: the bytes that the run then takes there. None for an engine's GPU: the cache takes all free memory.
    """

    change: Change
    nbytes: int | None

    def __str__(self) -> str:
        values = {key: str(value).lower() if isinstance(value, bool) else value for key, value in self.change.items()}
        text = " and ".join(f"{key} to {value}" for key, value in values.items())
        return f"{text} ({self.nbytes / GB:.1f} GB)" if self.nbytes is not None else text


def remedies(
    spec: ExperimentSpec, excess: Excess, again: Callable[[ExperimentSpec], Estimate], kv_heads: int
) -> list[Remedy]:
    """Return at most ``SHOWN`` changes, the best first. Each of them makes the run fit on the device.

    A change that is not enough is tried together with the earlier changes that were not enough either. ``again`` makes
    an estimate; ``kv_heads`` is the model's number of key-value heads.
    """
    found: list[Remedy] = []
    tried: Change = {}
    for change in _changes(spec, excess.device.role, kv_heads):
        attempts = (_tried(excess, change=attempt, spec=spec, again=again) for attempt in (change, {**tried, **change}))
        if remedy := next(filter(None, attempts), None):
            found.append(remedy)
        else:
            tried = {**tried, **change}
        if len(found) == SHOWN:
            break
    return found


def _tried(
    excess: Excess, change: Change, spec: ExperimentSpec, again: Callable[[ExperimentSpec], Estimate]
) -> Remedy | None:
    changed = with_changes(spec, change)
    result = again(changed)
    role, name = excess.device.role, excess.device.name
    for problem in excesses(changed, result):
        of_engine = problem.cannot and problem.device.role is Role.ENGINE and "rollout.gpus_per_engine" in change
        if of_engine or (problem.device.role, problem.device.name) == (role, name):
            return None
    left = [device.total for device in result.devices if device.name == name and device.role is not Role.ENGINE]
    return Remedy(change, left[0] if left else None)


def _changes(spec: ExperimentSpec, role: Role, kv_heads: int) -> Iterator[Change]:
    rollout = spec.rollout
    match role:
        case Role.TRAINER:
            yield from _trainer_changes(spec, kv_heads)
        case Role.BOTH:  # lower the states of a rank, or an engine's share of their GPU
            of_states = {"trainer.zero_stage", "trainer.offload", "trainer.dtype"}
            yield from (change for change in _trainer_changes(spec, kv_heads) if change.keys() & of_states)
            shares = (tenths / 10 for tenths in range(9, 0, -1))
            yield from ({"rollout.gpus_per_engine": share} for share in shares if share < rollout.gpus_per_engine)
        case Role.ENGINE:
            yield from _shorter(spec)
            for factor in (2, 4, 8):
                if rollout.gpus_per_engine >= 1 and rollout.gpus_per_engine * factor <= spec.cluster.gpus_per_host:
                    yield {"rollout.gpus_per_engine": int(rollout.gpus_per_engine) * factor}
            yield from _fewer_rollouts(spec)
        case Role.HOST:
            yield from _host_changes(spec, kv_heads)


def _shorter(spec: ExperimentSpec) -> Iterator[Change]:
    if spec.model.max_length > spec.rollout.longest_rollout:
        yield {"model.max_length": spec.rollout.longest_rollout}


def _fewer_rollouts(spec: ExperimentSpec) -> Iterator[Change]:
    running = spec.rollout.max_running_rollouts
    while running > spec.rollout.group_size:
        running //= 2
        yield {"rollout.max_running_rollouts": running}


def _trainer_changes(spec: ExperimentSpec, kv_heads: int) -> Iterator[Change]:
    trainer = spec.trainer
    if not trainer.gradient_checkpointing:
        yield {"trainer.gradient_checkpointing": True}
    if trainer.zero_stage < 3 and trainer.ranks > 1:
        yield {"trainer.zero_stage": 3}
    rows, length, _ = largest_microbatch(spec)
    if rows > 1:
        tokens = max(length, trainer.tokens_per_microbatch // 2 // length * length)
        yield {"trainer.tokens_per_microbatch": tokens}
        if tokens > length:
            yield {"trainer.tokens_per_microbatch": length}
    experts_divided = trainer.expert_parallel > 1
    if trainer.offload == "none" and trainer.gpus_per_rank and trainer.zero_stage and not experts_divided:
        yield {"trainer.offload": "optimizer"}
    if trainer.attention != "eager":
        for size in (2 * trainer.sequence_parallel, 4 * trainer.sequence_parallel):
            if trainer.ranks % size == 0 and kv_heads % size == 0:
                yield {"trainer.sequence_parallel": size}
    for ranks in (2 * trainer.ranks, 4 * trainer.ranks):
        yield {"trainer.ranks": ranks}
    if trainer.dtype == "float32" and trainer.gpus_per_rank:
        yield {"trainer.dtype": "bfloat16", "rollout.dtype": "bfloat16"}


def _host_changes(spec: ExperimentSpec, kv_heads: int) -> Iterator[Change]:
    rollout, trainer = spec.rollout, spec.trainer
    if not rollout.gpus_per_engine:
        yield from _shorter(spec)
        if rollout.kv_cache_mb is None:
            yield from _fewer_rollouts(spec)
    if not trainer.gpus_per_rank:
        yield from (c for c in _trainer_changes(spec, kv_heads) if "trainer.ranks" not in c)
        if trainer.ranks > 1 and trainer.ranks // 2 % lcm(trainer.sequence_parallel, trainer.expert_parallel) == 0:
            yield {"trainer.ranks": trainer.ranks // 2}
    elif trainer.offload == "all":
        yield {"trainer.offload": "optimizer"}
    elif trainer.offload == "optimizer":
        yield {"trainer.offload": "none"}
    if rollout.max_engines > 1 and not rollout.gpus_per_engine:
        yield {"rollout.engines": rollout.max_engines // 2}
    if rollout.dtype == "float32":
        yield {"rollout.dtype": "bfloat16", "trainer.dtype": "bfloat16"}
