"""Checks that a run fits into the memory of GPUs and hosts.

`asyncrl validate-spec --memory` and `asyncrl train --dry-run` estimate all parts. A start leaves out activations,
because counting them takes seconds: its result is a lower bound, and a run is refused if even this is too large
(decision 0047).
"""

from __future__ import annotations

from dataclasses import replace

from asyncrl_cli.checks.finding import Result, Warned
from asyncrl_cli.checks.machine import nvidia_smi
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.sizing.estimate import Estimate, Excess, estimate, excesses
from asyncrl_cli.sizing.memory_use import GB, Device, MemoryRole, size_text
from asyncrl_cli.sizing.model import SizedModel
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.memory import available_memory


def check_memory_estimate(spec: ExperimentSpec, model: SizedModel, thorough: bool) -> Result:
    """Check that each GPU and host has the memory that the run needs. Raises ``ConfigError`` if not.

    ``thorough``: include the activations of a micro-batch.
    """
    if not thorough:
        model = replace(model, activations=lambda *_: 0)
    result = estimate_memory(spec, model)
    refusal, warnings = memory_problems(spec, result)
    if refusal is not None:
        raise refusal
    text = "\n".join(map(_line, result.devices))
    if not warnings:
        return text
    hints = (warning.hint for warning in warnings)
    return Warned("\n".join([text, *(warning.text for warning in warnings)]), "; ".join(dict.fromkeys(hints)))


def _line(device: Device) -> str:
    capacity = f" of {size_text(device.capacity)}" if device.capacity is not None else ""
    count = f"{device.count} × " if device.count > 1 else ""
    uses = ", ".join(f"{p.name} {size_text(p.bytes)}" for p in sorted(device.parts, key=lambda use: -use.bytes))
    return f"{count}{device.name}: {size_text(device.total)}{capacity} ({uses})"


def estimate_memory(spec: ExperimentSpec, model: SizedModel, gpu_bytes: int | None = None) -> Estimate:
    """Estimate a run's memory on GPUs of ``gpu_bytes``. None: take the size from the spec, or from this machine."""
    cluster = spec.cluster
    if gpu_bytes is None:
        gpu_bytes = int(cluster.gpu_memory_gb * GB) if cluster.gpu_memory_gb is not None else installed_gpu_memory()
    host_bytes = int(cluster.host_memory_gb * GB) if cluster.host_memory_gb is not None else None
    uses_gpus = spec.trainer.gpus_per_rank or spec.rollout.gpus_per_engine
    if host_bytes is None and cluster.address is None and (not uses_gpus or installed_gpu_memory() is not None):
        host_bytes = available_memory()
    return estimate(spec, model=model, gpu_bytes=gpu_bytes, host_bytes=host_bytes)


def memory_problems(spec: ExperimentSpec, result: Estimate) -> tuple[ConfigError | None, list[Warned]]:
    """Return the first problem that makes every run fail, and the problems that may do so."""
    refusal, warnings = None, []
    for excess in excesses(spec, result):
        key, advice = _advice(spec, excess)
        if not excess.is_refused:
            warnings.append(Warned(excess.message, advice))
        elif refusal is None:
            message = f"the run does not fit into memory: {excess.message}"
            refusal = ConfigError(message, location=key, hint=advice)
    return refusal, warnings


def installed_gpu_memory() -> int | None:
    """Return the bytes of this machine's smallest GPU, or None without GPUs."""
    answer = nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    try:
        return min((int(line) * 2**20 for line in answer.split()), default=None)
    except ValueError:
        return None


def _advice(spec: ExperimentSpec, excess: Excess) -> tuple[str, str]:
    """The key that decides the size of a device's largest part, and the changes that make the part smaller."""
    rollout, trainer, device = spec.rollout, spec.trainer, excess.device
    model = "model.init.config" if spec.model.init is not None else "model.path"
    smaller_model = "a smaller model, adapters (model.lora)"
    if device.role is MemoryRole.ENGINE:
        shorter = "lower model.max_length or rollout.max_running_rollouts"
        return "rollout.gpus_per_engine", f"raise rollout.gpus_per_engine, {shorter}, or use a smaller model"
    if device.role is MemoryRole.BOTH:
        return "rollout.gpus_per_engine", f"lower rollout.gpus_per_engine, or use {smaller_model} or trainer.offload"
    largest = max(device.parts, key=lambda use: use.bytes).name
    if largest == "key-value caches":
        if rollout.kv_cache_mb is not None:
            return "rollout.kv_cache_mb", "lower it, or remove it"
        if spec.model.max_length > rollout.max_running_rollouts * (rollout.longest_rollout // 2):
            return "model.max_length", "lower it: the cache of each engine has room for one sequence of this length"
        return "rollout.max_running_rollouts", "lower it, or set rollout.kv_cache_mb"
    if largest == "processes":
        return "this machine", "stop other programs, or lower rollout.engines or trainer.ranks"
    if "activations" in largest:
        recomputing = "" if trainer.gradient_checkpointing else "set trainer.gradient_checkpointing: true, "
        sequence_text = f"a sequence has up to {rollout.longest_rollout:,} tokens"
        hint = f"{recomputing}lower it ({sequence_text}), or raise trainer.sequence_parallel"
        return "trainer.tokens_per_microbatch", hint
    if device.role is MemoryRole.HOST and trainer.gpus_per_rank and trainer.offload != "none":
        return "trainer.offload", f"set it to none, or use more hosts, {smaller_model}"
    return model, f"use {smaller_model}, a higher trainer.zero_stage with more trainer.ranks, or fewer engines"
