"""The memory of a trainer rank's GPU: what of it the rank may use, and what to change when it is full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from asyncrl_cli.core.errors import RunError
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


@contextmanager
def full_gpu_explained(spec: ExperimentSpec, rank: int) -> Iterator[None]:
    """Raises ``RunError`` with the keys that lower what a rank needs, when the block finds no memory on the GPU."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        trainer = spec.trainer
        advice = [
            "set trainer.gradient_checkpointing to true" if not trainer.gradient_checkpointing else "",
            f"lower trainer.tokens_per_microbatch ({trainer.tokens_per_microbatch})",
            "raise trainer.gpus_per_rank and lower rollout.gpus_per_engine" if shares_gpus(spec) else "",
            "set trainer.offload to optimizer" if trainer.offload == "none" and trainer.zero_stage else "",
        ]
        raise RunError(
            f"the GPU's memory is full: {str(error).splitlines()[0]}",
            location=f"trainer-{rank}",
            hint=f"{', or '.join(filter(None, advice))}; `asyncrl validate-spec SPEC --memory` estimates what it takes",
        ) from error
