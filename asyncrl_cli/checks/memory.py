"""Whether a run fits into the memory of GPUs and hosts.

`asyncrl validate-spec --memory` and `asyncrl train --dry-run` estimate all parts. A start does not count activations,
because estimating them takes seconds: its result is a lower bound, and a run whose lower bound is too large is refused.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asyncrl_cli.checks.finding import Result, Warned
from asyncrl_cli.checks.machine import available_memory, nvidia_smi
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.sizing.estimate import Estimate, estimate, excesses
from asyncrl_cli.sizing.model import SizedModel
from asyncrl_cli.sizing.parts import GB, Device, Role, shown
from asyncrl_cli.sizing.remedies import remedies
from asyncrl_cli.spec.sections import ExperimentSpec


def check_memory_estimate(spec: ExperimentSpec, model: SizedModel, thorough: bool) -> Result:
    """Whether each GPU and host has the memory that the run needs. Raises ``ConfigError`` if not.

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
    """A GPU or host in one line, with its largest parts first."""
    of = f" of {shown(device.capacity)}" if device.capacity is not None else ""
    count = f"{device.count} × " if device.count > 1 else ""
    parts = sorted(device.parts, key=lambda part: -part.bytes)
    return f"{count}{device.name}: {shown(device.total)}{of} ({', '.join(f'{p.name} {shown(p.bytes)}' for p in parts)})"


def estimate_memory(spec: ExperimentSpec, model: SizedModel, gpu_bytes: int | None = None) -> Estimate:
    """The estimate for GPUs of ``gpu_bytes``; None: of the memory that the spec gives, or else of this machine."""
    cluster = spec.cluster
    if gpu_bytes is None:
        gpu_bytes = int(cluster.gpu_memory_gb * GB) if cluster.gpu_memory_gb is not None else installed_gpu_memory()
    host_bytes = int(cluster.host_memory_gb * GB) if cluster.host_memory_gb is not None else None
    wants_gpus = spec.trainer.gpus_per_rank or spec.rollout.gpus_per_engine
    if host_bytes is None and cluster.address is None and (not wants_gpus or installed_gpu_memory() is not None):
        host_bytes = available_memory()
    return estimate(spec, model, gpu_bytes, host_bytes)


def memory_problems(
    spec: ExperimentSpec, model: SizedModel, found: Estimate
) -> tuple[ConfigError | None, list[Warned]]:
    """The first problem with which every run fails, and those with which a run may fail; hints say what to change."""
    refused, warned = None, []
    for problem in excesses(spec, found):
        again = partial(estimate_memory, model=model, gpu_bytes=problem.device.gpu)
        helpful = remedies(spec, problem, again, model.kv_heads)
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
    """Bytes of the smallest GPU of this machine; None without GPUs."""
    answer = nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    try:
        return min((int(line) * 2**20 for line in answer.split()), default=None)
    except ValueError:
        return None


def _advice(spec: ExperimentSpec, device: Device) -> tuple[str, str]:
    """The key that decides on the largest part of a device, and what to do with it."""
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
