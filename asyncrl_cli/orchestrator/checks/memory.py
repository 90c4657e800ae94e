"""Whether a local run's weights and key-value caches fit into this machine's memory.

A lower bound: activations, reference models and critics are not counted. So what is clearly above cannot run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.orchestrator.checks.finding import Finding
from asyncrl_cli.orchestrator.checks.machine import GIB, available_memory, memory_without_weights
from asyncrl_cli.spec.sections import ExperimentSpec

TOO_MUCH, MUCH = 1.1, 0.9
"""Shares of the available memory: above the first a run is refused, above the second it is warned of."""
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
ADAM_BYTES = 8
"""Of Adam's two moments, for a trained parameter; they are float32."""


class ModelSize(NamedTuple):
    """Numbers of parameters, with adapters."""

    parameters: int
    trained: int


def check_weights_memory(spec: ExperimentSpec, config: Any, size: ModelSize) -> str | Finding:
    """The CPU parts of a local run fit into memory with their weights and caches. Raises ``ConfigError``."""
    if spec.cluster.address is not None:
        return "the cluster's"
    engines = 0 if spec.rollout.gpus_per_engine else spec.rollout.max_engines
    cache = engines * _cache_bytes(spec, config) if engines else 0
    parts = {
        "key-value caches": cache,
        # Twice: while an engine generates, the next version is made beside its weights (decision 0052).
        "weights of the engines": 2 * engines * size.parameters * NUMBER_BYTES[spec.rollout.dtype],
        "weights, gradients and optimizer of the trainer": 0 if spec.trainer.gpus_per_rank else _trainer(spec, size),
        "processes": memory_without_weights(spec),
    }
    needed, available = sum(parts.values()), available_memory()
    terms = ", ".join(f"{name} {part / GIB:.1f}" for name, part in parts.items() if part)
    found = f"about {needed / GIB:.1f} GiB needed ({terms}), {available / GIB:.1f} GiB available"
    if needed <= MUCH * available:
        return found
    location, hint = _key_to_change(spec, max(parts, key=lambda name: parts[name]))
    if needed > TOO_MUCH * available:
        raise ConfigError(f"the run does not fit into memory: {found}", location=location, hint=hint)
    return Finding("memory with weights", "warning", found, hint)


def _cache_bytes(spec: ExperimentSpec, config: Any) -> int:
    from asyncrl_cli.rollout.engine_settings import kv_cache_bytes

    return kv_cache_bytes(spec, config.get_text_config())


def _trainer(spec: ExperimentSpec, size: ModelSize) -> int:
    """Bytes of all ranks together. ZeRO shares the optimizer (1), gradients (2) and weights (3) out among them."""
    trainer = spec.trainer
    number = NUMBER_BYTES[trainer.dtype]
    optimizer = size.trained * (ADAM_BYTES + (4 if trainer.dtype == "bfloat16" else 0))
    kept = ((1, optimizer), (2, size.trained * number), (3, size.parameters * number))
    return sum(part * (1 if trainer.zero_stage >= stage else trainer.ranks) for stage, part in kept)


def _key_to_change(spec: ExperimentSpec, largest: str) -> tuple[str, str]:
    """The key to change, and how."""
    rollout = spec.rollout
    if largest == "key-value caches":
        if rollout.kv_cache_mb is not None:
            return "rollout.kv_cache_mb", "lower it, or leave it out"
        if (
            spec.model.max_length
            > rollout.max_running_rollouts * (rollout.max_prompt_tokens + rollout.max_response_tokens) // 2
        ):
            return "model.max_length", "lower it: the cache of each engine has room for one sequence of this length"
        return "rollout.max_running_rollouts", "lower it, or set rollout.kv_cache_mb"
    location = "model.init.config" if spec.model.init is not None else "model.path"
    hints = {
        "weights of the engines": "use a smaller model, fewer engines, or rollout.dtype bfloat16",
        "processes": "stop other programs, or lower rollout.engines or trainer.ranks",
    }
    return location, hints.get(largest, "use a smaller model, adapters (model.lora), or a higher trainer.zero_stage")
