"""Whether a run fits: what each of its GPUs and hosts has to hold, and what it has."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl_cli.sizing.engine import Cache, cpu_cache, engine_parts, gpu_cache, gpu_share
from asyncrl_cli.sizing.host import JOURNAL_BYTES, cpu_cache_bytes, host_kinds, host_parts, step_tokens
from asyncrl_cli.sizing.model import SizedModel
from asyncrl_cli.sizing.parts import GB, Device, Part
from asyncrl_cli.sizing.trainer import rank_parts
from asyncrl_cli.spec.sections import ExperimentSpec

TOO_MUCH, MUCH = 1.1, 0.9
"""Shares of the memory that is there: above the first a run is refused, above the second it is warned of."""
GPU_RANK_BYTES = 2 * GB
"""CUDA context, NCCL and what the allocator cannot use, of a rank: assumed."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory of a run.

    Attributes:
        devices: GPUs by what runs on them, then hosts. Ranks and engines on CPUs are parts of a host.
        cache: of each engine; None where the model's config does not say what a token takes, or the GPU is not known.
        journal: bytes by which the journal grows in a step.
    """

    devices: tuple[Device, ...]
    cache: Cache | None
    journal: int


def estimate(spec: ExperimentSpec, model: SizedModel, gpu_bytes: int | None, host_bytes: int | None) -> Estimate:
    """The estimate of a run. ``gpu_bytes``, ``host_bytes``: what each has; None where that is not known."""
    rollout, trainer = spec.rollout, spec.trainer
    engine = engine_parts(spec, model)
    if rollout.gpus_per_engine:
        cache = gpu_cache(spec, model, gpu_bytes) if gpu_bytes is not None else None
        if cache is not None:
            engine = (*engine, Part("key-value cache", max(0, cache.bytes), f"{max(0, cache.tokens):,} tokens"))
    else:
        cache = cpu_cache(spec, model, cpu_cache_bytes(spec, model))
    rank = (
        (*rank_parts(spec, model).device, Part("CUDA context", GPU_RANK_BYTES, "assumed"))
        if trainer.gpus_per_rank
        else ()
    )
    devices: list[Device] = []
    if shares_a_gpu(spec):
        parts = tuple(part._replace(name=f"engine: {part.name}") for part in engine)
        parts += tuple(part._replace(name=f"rank: {part.name}") for part in rank)
        devices.append(
            Device("shared", "GPU of an engine and a rank", max(rollout.max_engines, trainer.ranks), parts, gpu_bytes)
        )
    else:
        if trainer.gpus_per_rank:
            devices.append(Device("trainer", "GPU of a trainer rank", trainer.ranks, rank, gpu_bytes))
        if rollout.gpus_per_engine:
            number = rollout.max_engines * int(rollout.gpus_per_engine)
            devices.append(Device("engine", "GPU of an engine", number, engine, gpu_bytes))
    for kind in host_kinds(spec):
        devices.append(Device("host", kind.name, kind.number, host_parts(spec, model, kind), host_bytes))
    return Estimate(tuple(devices), cache, step_tokens(spec) * JOURNAL_BYTES)


def shares_a_gpu(spec: ExperimentSpec) -> bool:
    """Whether an engine and a trainer rank are on the same GPU, each with a part of it."""
    parts = (spec.rollout.gpus_per_engine, spec.trainer.gpus_per_rank)
    return all(parts) and any(part < 1 for part in parts)


@dataclass(frozen=True, slots=True)
class Excess:
    """A device that does not have what the run needs, or hardly has."""

    device: Device
    cannot: bool  # else it may, and is tight
    message: str


def excesses(spec: ExperimentSpec, found: Estimate) -> list[Excess]:
    """What does not fit, GPUs first."""
    problems = []
    for device in found.devices:
        if device.capacity is None:
            continue
        if device.role == "engine":
            problems += _cache_problems(spec, device, found.cache)
            continue
        if device.total > MUCH * device.capacity:
            message = f"a {device.name} needs about {device.total / GB:.1f} GB, and has {device.capacity / GB:.1f} GB"
            problems.append(Excess(device, device.total > TOO_MUCH * device.capacity, message))
        elif device.role == "shared":
            problems += _cache_problems(spec, device, found.cache)
    return problems


def _cache_problems(spec: ExperimentSpec, device: Device, cache: Cache | None) -> list[Excess]:
    if cache is None or device.capacity is None:
        return []
    share = f"{gpu_share(spec):.2f} of a GPU's {device.capacity / GB:.1f} GB"
    if cache.bytes <= 0:
        message = f"an engine has {share}, {-cache.bytes / GB:.1f} GB less than its weights and buffers need"
        return [Excess(device, True, message)]
    if cache.tokens < spec.model.max_length:
        message = (
            f"an engine has {share}: room for {cache.tokens:,} tokens of keys and values, less than one sequence of "
            f"model.max_length {spec.model.max_length:,}"
        )
        return [Excess(device, True, message)]
    wanted = spec.rollout.max_running_rollouts
    if cache.average < wanted:
        message = (
            f"an engine's key-value cache has room for {cache.average:,} rollouts of half the longest length, and "
            f"rollout.max_running_rollouts is {wanted:,}: vLLM will interrupt some and compute them again"
        )
        return [Excess(device, False, message)]
    return []
