"""Checks that a run fits into the memory of GPUs and hosts.

`asyncrl validate-spec --memory` and `asyncrl train --dry-run` refuse a run by the estimate of all parts. A start
refuses it only if the parts without activations are too large, and otherwise warns: the estimate of activations has
not been compared with a GPU (decision 0047).
"""

from __future__ import annotations

from dataclasses import replace

from asyncrl_cli.checks.finding import Result, Warned
from asyncrl_cli.checks.machine import nvidia_smi
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.sizing.config import one_line
from asyncrl_cli.sizing.engine import choose_running_rollouts
from asyncrl_cli.sizing.estimate import Estimate, Excess, estimate, excesses, rank_gpu
from asyncrl_cli.sizing.memory_use import GB, Device, MemoryRole, size_text
from asyncrl_cli.sizing.microbatch import cautious_microbatch, choose_microbatch
from asyncrl_cli.sizing.model import SizedModel
from asyncrl_cli.spec.sections import ExperimentSpec, TrainerSpec
from asyncrl_cli.system.memory import available_memory


def check_memory_estimate(spec: ExperimentSpec, model: SizedModel, thorough: bool) -> Result:
    """Check that each GPU and host has the memory that the run needs. Raises ``ConfigError`` if not.

    ``thorough``: refuse a run because of a micro-batch's activations, too; otherwise warn about them on GPUs.
    """
    if not thorough:
        without_activations = replace(model, activations=lambda *_: 0)
        lower_bound = estimate_memory(spec, without_activations)
        if (refusal := memory_problems(spec, lower_bound)[0]) is not None:
            raise refusal
        if not spec.trainer.gpus_per_rank or rank_bytes(spec, model) is None:
            model = without_activations
    result = estimate_memory(spec, model)
    refusal, warnings = memory_problems(spec, result)
    if refusal is not None:
        if thorough:
            raise refusal
        warnings = [Warned(refusal.message, f"{refusal.location}: {refusal.hint}"), *warnings]
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


def resolve_microbatch(
    spec: ExperimentSpec, model: SizedModel, gpu_bytes: int | None = None
) -> tuple[ExperimentSpec, Result]:
    """Return the spec with plain values for the keys that are `auto`, and a line about them.

    ``gpu_bytes`` as in ``estimate_memory``. If they are unknown, or the model's activations cannot be counted, the
    values are cautious, and the line is a warning.
    """
    if gpu_bytes is None:
        gpu_bytes = gpu_memory(spec)
    problem, hint = "", "set cluster.gpu_memory_gb, or trainer.tokens_per_microbatch and trainer.gradient_checkpointing"
    try:
        microbatch = choose_microbatch(spec, model, gpu_bytes)
        if gpu_bytes is None and spec.trainer.gpus_per_rank:
            problem = "the GPUs' memory is unknown"
    except Exception as error:  # the code of some models needs the values of its tensors
        microbatch = cautious_microbatch(spec)
        problem, hint = f"activations cannot be counted: {one_line(error)}", hint.partition(" or ")[2]
    text = microbatch_text(microbatch.applied(spec).trainer)
    return microbatch.applied(spec), Warned(f"{text}, because {problem}", hint) if problem else text


def microbatch_text(trainer: TrainerSpec) -> str:
    """Describe a micro-batch in a few words."""
    return f"{trainer.microbatch_tokens:,} tokens a micro-batch{', recomputed' if trainer.recomputes else ''}"


def resolve_rollouts(
    spec: ExperimentSpec, model: SizedModel, gpu_bytes: int | None = None
) -> tuple[ExperimentSpec, Result]:
    """Return the spec with a number for `rollout.max_running_rollouts: auto`, and a line about it.

    ``gpu_bytes`` as in ``estimate_memory``. If no cache can be estimated, an engine runs as many as a CPU engine and
    at least a group, and the line is a warning.
    """
    rollout, problem = spec.rollout, ""
    if (running := rollout.max_running_rollouts) == "auto":
        if gpu_bytes is None:
            gpu_bytes = gpu_memory(spec)
        chosen = (
            choose_running_rollouts(spec, model, gpu_bytes) if rollout.gpus_per_engine else rollout.running_rollouts
        )
        problem = ", because the size of the engines' caches is unknown" if chosen is None else ""
        running = chosen or max(rollout.group_size, rollout.running_rollouts)
        spec = spec.model_copy(update={"rollout": rollout.model_copy(update={"max_running_rollouts": running})})
    text = f"up to {counted(running, 'rollout')} at a time in each engine{problem}"
    return spec, Warned(text, "set cluster.gpu_memory_gb or rollout.max_running_rollouts") if problem else text


def rank_bytes(spec: ExperimentSpec, model: SizedModel) -> int | None:
    """Return a GPU rank's estimated bytes, or None if the model's activations cannot be counted."""
    try:
        return rank_gpu(spec, model, None).total
    except Exception:  # as in ``resolve_microbatch``
        return None


def gpu_memory(spec: ExperimentSpec) -> int | None:
    """Return the bytes of a GPU by the spec, or of this machine's smallest one; None without both."""
    memory_gb = spec.cluster.gpu_memory_gb
    return int(memory_gb * GB) if memory_gb is not None else installed_gpu_memory()


def estimate_memory(spec: ExperimentSpec, model: SizedModel, gpu_bytes: int | None = None) -> Estimate:
    """Estimate a run's memory on GPUs of ``gpu_bytes``. None: take the size from the spec, or from this machine."""
    cluster = spec.cluster
    if gpu_bytes is None:
        gpu_bytes = gpu_memory(spec)
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
    device = excess.device
    if device.role is MemoryRole.ENGINE:
        shorter = "lower model.max_length or rollout.max_running_rollouts"
        return "rollout.gpus_per_engine", f"raise rollout.gpus_per_engine, {shorter}, or use a smaller model"
    if device.role is MemoryRole.BOTH:
        return "rollout.gpus_per_engine", "lower rollout.gpus_per_engine, or use a smaller model or trainer.offload"
    largest = max(device.parts, key=lambda use: use.bytes).name
    if largest == "key-value caches":
        if spec.rollout.kv_cache_mb is not None:
            return "rollout.kv_cache_mb", "lower it, or remove it"
        if spec.model.max_length > spec.rollout.running_rollouts * (spec.rollout.longest_rollout // 2):
            return "model.max_length", "lower it: the cache of each engine has room for one sequence of this length"
        return "rollout.max_running_rollouts", "lower it, or set rollout.kv_cache_mb"
    if largest == "processes":
        return "this machine", "stop other programs, or lower rollout.engines or trainer.ranks"
    if "activations" in largest:
        return (
            "trainer.tokens_per_microbatch",
            f"lower it (a sequence has up to {spec.rollout.longest_rollout:,} tokens), set "
            "trainer.gradient_checkpointing: true, or raise trainer.sequence_parallel",
        )
    key = "model.init.config" if spec.model.init is not None else "model.path"
    return key, "use a smaller model, adapters (model.lora), a higher trainer.zero_stage with more ranks, or more hosts"
