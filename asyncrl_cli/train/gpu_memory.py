"""The memory of a GPU that a trainer rank shares with an engine."""

from __future__ import annotations

from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.spec.sharing import engines_sleep, memory_share, shares_gpus


def keep_to_share(spec: ExperimentSpec) -> None:
    """Have torch refuse to take more of the GPU than the rank's share, while an engine uses the rest.

    Otherwise the first long batch takes memory that an engine needs to start again. Where engines sleep during a step
    the rank may take what they give back, for the step (``give_back``).
    """
    import torch

    if shares_gpus(spec) and not engines_sleep(spec):
        torch.cuda.set_per_process_memory_fraction(memory_share(spec.trainer.gpus_per_rank))


def give_back(spec: ExperimentSpec) -> None:
    """After a step: return to the GPU what torch keeps for later; the engine that wakes up needs it."""
    import torch

    if engines_sleep(spec):
        torch.cuda.empty_cache()
