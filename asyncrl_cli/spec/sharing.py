"""How an engine and a trainer rank divide a GPU that they share.

`rollout.gpus_per_engine` and `trainer.gpus_per_rank` below 1 are shares of one GPU (decision 0051).
"""

from __future__ import annotations

from asyncrl_cli.spec.sections import ExperimentSpec

USABLE = 0.92
"""The fraction of a process's GPU memory that its tensors may take (vLLM's default). The rest is for the CUDA context,
kernels and NCCL's buffers."""


def shares_gpus(spec: ExperimentSpec) -> bool:
    """Whether each engine shares its GPU with a trainer rank."""
    return 0 < spec.rollout.gpus_per_engine < 1 and 0 < spec.trainer.gpus_per_rank < 1


def engines_sleep(spec: ExperimentSpec) -> bool:
    """Whether engines release their GPU memory while the trainer trains: if nothing is generated at that time."""
    return shares_gpus(spec) and spec.pipeline.mode == "sync"


def memory_share(gpus: float) -> float:
    """The fraction of one GPU's memory that a process may use for tensors; ``gpus``: its GPUs, or its share of one."""
    return USABLE * min(gpus, 1)


def tensor_parallel(spec: ExperimentSpec) -> int:
    """An engine's tensor-parallel size: its number of GPUs; a share of a GPU counts as one."""
    return max(1, int(spec.rollout.gpus_per_engine))
