"""Estimates the memory that a run needs on each GPU and host, and compares it with the available memory."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl_cli.sizing.engine import Cache, cpu_cache, engine_uses, gpu_cache
from asyncrl_cli.sizing.host import JOURNAL_BYTES, host_kinds, host_uses, step_tokens
from asyncrl_cli.sizing.memory_use import GB, Device, MemoryRole, MemoryUse
from asyncrl_cli.sizing.model import SizedModel
from asyncrl_cli.sizing.trainer import lasting_uses, rank_uses
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.spec.sharing import engine_memory_share, engines_sleep, memory_share, shares_gpus, tensor_parallel

REFUSAL_SHARE, WARNING_SHARE = 1.1, 0.9
"""Shares of the available memory. A run that needs more than the first is refused; more than the second gives a
warning."""
GPU_RANK_BYTES, GROUPED_RANK_BYTES = 2 * GB, 3 * GB
"""A rank's CUDA context, NCCL, and memory that the allocator cannot use: assumed. The second for ranks with
``expert_parallel`` or ``sequence_parallel``: each further group of ranks has its own NCCL buffers."""
CONTEXT_BYTES = 6 * GB // 10
"""A CUDA context, outside of a process's share of a GPU: assumed."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A run's memory."""

    devices: tuple[Device, ...]  # GPUs by their use, then hosts, with the ranks and engines on their CPUs
    cache: Cache | None  # each engine's; None if a token's size or the GPU is unknown
    journal: int  # bytes that a step adds to the journal


def estimate(spec: ExperimentSpec, model: SizedModel, gpu_bytes: int | None, host_bytes: int | None) -> Estimate:
    """Estimate a run's memory. ``gpu_bytes``, ``host_bytes``: memory of a GPU and of a host; None: unknown."""
    rollout, trainer = spec.rollout, spec.trainer
    engine_memory = engine_uses(spec, model, gpu_bytes)
    if rollout.gpus_per_engine:
        cache = gpu_cache(spec, model, gpu_bytes) if gpu_bytes is not None else None
        if cache is not None:
            engine_memory = (
                *engine_memory,
                MemoryUse("key-value cache", max(0, cache.bytes), f"{max(0, cache.tokens):,} tokens"),
            )
    else:
        cache = cpu_cache(spec, model)
    devices: list[Device] = []
    if trainer.gpus_per_rank:
        devices.append(rank_gpu(spec, model, gpu_bytes))
    if rollout.gpus_per_engine:
        name = "GPU of an engine, shared" if shares_gpus(spec) else "GPU of an engine"
        count = rollout.max_engines * tensor_parallel(spec)
        devices.append(Device(MemoryRole.ENGINE, name, count, parts=engine_memory, capacity=gpu_bytes))
    if engines_sleep(spec):
        devices.append(_both_awake(spec, model=model, engine=engine_memory, gpu_bytes=gpu_bytes))
    for host_kind in host_kinds(spec):
        uses = host_uses(spec, model, host_kind)
        devices.append(Device(MemoryRole.HOST, host_kind.name, host_kind.host_count, parts=uses, capacity=host_bytes))
    journal = step_tokens(spec) * (JOURNAL_BYTES + model.routed * spec.algorithm.router_replay)
    return Estimate(tuple(devices), cache, journal)


def rank_gpu(spec: ExperimentSpec, model: SizedModel, gpu_bytes: int | None) -> Device:
    """Return a trainer rank's GPU, or its share of one, which is all of it while the engine on the GPU sleeps."""
    name, uses, capacity = "GPU of a trainer rank", rank_uses(spec, model).device, gpu_bytes
    if not shares_gpus(spec):
        is_grouped = max(spec.trainer.expert_parallel, spec.trainer.sequence_parallel) > 1
        uses = (*uses, MemoryUse("CUDA context", GROUPED_RANK_BYTES if is_grouped else GPU_RANK_BYTES, "assumed"))
    else:
        name = f"share of a {name}"
        share = memory_share(1 if engines_sleep(spec) else spec.trainer.gpus_per_rank)
        capacity = None if gpu_bytes is None else int(share * gpu_bytes)
    return Device(MemoryRole.TRAINER, name, spec.trainer.ranks, parts=uses, capacity=capacity)


def _both_awake(
    spec: ExperimentSpec, model: SizedModel, engine: tuple[MemoryUse, ...], gpu_bytes: int | None
) -> Device:
    """A shared GPU between two steps: the engine is awake, and the rank keeps its states."""
    uses = (
        *lasting_uses(spec, model),
        MemoryUse("engine", sum(use.bytes for use in engine), f"{engine_memory_share(spec):.2f} of the GPU"),
        MemoryUse("CUDA contexts", 2 * CONTEXT_BYTES, "of both processes, assumed"),
    )
    name = "GPU of an engine that is awake and a rank"
    return Device(MemoryRole.BOTH, name, spec.trainer.ranks, parts=uses, capacity=gpu_bytes)


@dataclass(frozen=True, slots=True)
class Excess:
    """A device with too little memory for the run, or barely enough."""

    device: Device
    is_refused: bool  # the run is refused; otherwise it starts with a warning
    message: str


def excesses(spec: ExperimentSpec, memory: Estimate) -> list[Excess]:
    """Return the devices that are too small, GPUs first."""
    problems = []
    for device in memory.devices:
        if device.capacity is None:
            continue
        if device.role is MemoryRole.ENGINE:
            problems += _cache_problems(spec, device, memory.cache)
            continue
        # More exact than the other sums: the engine takes its share to the byte, and the rank's states are known.
        warning_share, refusal_share = (1.0, 1.0) if device.role is MemoryRole.BOTH else (WARNING_SHARE, REFUSAL_SHARE)
        if device.total > warning_share * device.capacity:
            message = f"a {device.name} needs about {device.total / GB:.1f} GB, and has {device.capacity / GB:.1f} GB"
            problems.append(Excess(device, device.total > refusal_share * device.capacity, message))
    return problems


def _cache_problems(spec: ExperimentSpec, device: Device, cache: Cache | None) -> list[Excess]:
    if cache is None or device.capacity is None:
        return []
    share = f"{engine_memory_share(spec):.2f} of a GPU's {device.capacity / GB:.1f} GB"
    if cache.bytes <= 0:
        message = f"an engine has {share}, {-cache.bytes / GB:.1f} GB less than its weights and buffers need"
        return [Excess(device, True, message)]
    if cache.tokens < spec.model.max_length:
        message = (
            f"an engine has {share}: room for {cache.tokens:,} tokens of keys and values, less than one sequence of "
            f"model.max_length {spec.model.max_length:,}"
        )
        return [Excess(device, True, message)]
    max_running = spec.rollout.running_rollouts
    if cache.average_rollouts < max_running:
        message = (
            f"an engine's key-value cache has room for {cache.average_rollouts:,} rollouts of a third of the longest "
            f"length, and rollout.max_running_rollouts is {max_running:,}: vLLM will interrupt some and compute them "
            "again"
        )
        return [Excess(device, False, message)]
    return []
