"""An engine and a trainer rank that share a GPU: what of it each may use.

`rollout.gpus_per_engine` and `trainer.gpus_per_rank` below 1 are shares of one GPU (decision 0051).
"""

from __future__ import annotations

from asyncrl_cli.spec.sections import ExperimentSpec

USABLE = 0.92
"""Of a process's share of a GPU, what its tensors may take: vLLM's own default. CUDA's context, kernels and NCCL's
buffers are in the rest."""


def shares_gpus(spec: ExperimentSpec) -> bool:
    """Whether each engine shares its GPU with a trainer rank."""
    return 0 < spec.rollout.gpus_per_engine < 1 and 0 < spec.trainer.gpus_per_rank < 1


def engines_sleep(spec: ExperimentSpec) -> bool:
    """Whether engines give their GPU memory back while the trainer trains: where nothing is generated meanwhile."""
    return shares_gpus(spec) and spec.pipeline.mode == "sync"


def memory_share(gpus: float) -> float:
    """The share of one GPU's memory that a process with ``gpus`` of it, or with whole ones, may use for tensors."""
    return USABLE * min(gpus, 1)


def tensor_parallel(spec: ExperimentSpec) -> int:
    """An engine's tensor-parallel size: its GPUs, of which a share is one."""
    return max(1, int(spec.rollout.gpus_per_engine))
