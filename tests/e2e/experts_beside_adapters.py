"""vLLM's CPU worker for a test of a model with both experts and adapters.

With adapters enabled, vLLM computes experts with a Triton kernel, which does not run on CPUs. These experts have no
adapters, so this worker selects the CPU kernel, as vLLM does without adapters. Everything else is as on GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantized

from asyncrl_cli.rollout.vllm_cpu_experts import CPUWorkerWithExperts

choose = unquantized.select_unquantized_moe_backend


def without_triton(moe_config: Any) -> Any:
    return choose(replace(moe_config, is_lora_enabled=False))


unquantized.select_unquantized_moe_backend = without_triton


class Worker(CPUWorkerWithExperts):
    """For the argument ``worker_cls``."""
