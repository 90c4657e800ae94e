"""How an engine and a trainer rank divide a GPU that they share.

`rollout.gpus_per_engine` and `trainer.gpus_per_rank` below 1 are shares of one GPU (decision 0039).
"""

from __future__ import annotations

from asyncrl_cli.spec.sections import ExperimentSpec

USABLE = 0.92
"""Fraction of a process's GPU memory that its tensors may take (vLLM's default). The CUDA context, kernels and NCCL's
buffers need the rest."""


def shares_gpus(spec: ExperimentSpec) -> bool:
    """True if each engine shares its GPU with a trainer rank."""
    return 0 < spec.rollout.gpus_per_engine < 1 and 0 < spec.trainer.gpus_per_rank < 1


def engines_sleep(spec: ExperimentSpec) -> bool:
    """True if engines release their GPU memory while the trainer trains, which needs a mode that generates nothing
    during training."""
    return shares_gpus(spec) and spec.pipeline.mode == "sync"


def memory_share(gpus: float) -> float:
    """Fraction of one GPU's memory that a process with ``gpus`` GPUs (or a share of one) may use for tensors."""
    return USABLE * min(gpus, 1)


def engine_memory_share(spec: ExperimentSpec) -> float:
    """Fraction of each of its GPUs' memory that an engine takes."""
    share = spec.rollout.engine_args.get("gpu_memory_utilization")
    return memory_share(spec.rollout.gpus_per_engine) if share is None else float(share)


def tensor_parallel(spec: ExperimentSpec) -> int:
    """An engine's tensor-parallel size: its number of GPUs. A share of a GPU counts as one GPU."""
    return max(1, int(spec.rollout.gpus_per_engine))
