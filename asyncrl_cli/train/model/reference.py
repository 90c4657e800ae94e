"""The reference model of the KL penalty: the initial model, or the policy as it was some steps ago.

A reference is called as a ``Policy`` is, without gradient. With adapters the initial model is the policy without them,
which takes no memory. Otherwise it is a separate model, frozen and complete on every rank; with
``algorithm.reference_update_every`` it becomes the policy before every step whose number that divides, so a run that
resumes from a checkpoint needs the reference of that step: it is a file of the checkpoint.

    state/reference.pt      the weights, where they are not those of the initial model
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl_cli.runs.checkpoints import STATE
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.deepspeed_engine import full_weights
from asyncrl_cli.train.model.lora import without_adapters
from asyncrl_cli.train.model.policy import Policy

FILE = "reference.pt"


class Unadapted:
    """The policy without what its adapters add."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __call__(self, input_ids: Tensor, response_mask: Tensor) -> Tensor:
        """As ``Policy.forward``; collective."""
        with torch.no_grad(), without_adapters(self._engine.module.model):
            logprobs: Tensor = self._engine(input_ids, response_mask)
        return logprobs


class Copy:
    """A separate model."""

    def __init__(self, policy: Policy, every: int = 0) -> None:
        """``every``: steps from one refresh to the next; 0: never."""
        self._policy = policy
        self._every = every

    def __call__(self, input_ids: Tensor, response_mask: Tensor) -> Tensor:
        """As ``Policy.forward``."""
        with torch.no_grad():
            logprobs: Tensor = self._policy(input_ids, response_mask)
        return logprobs

    def before_step(self, step: int, model: nn.Module, zero_stage: int) -> None:
        """Become the policy if it is due before ``step``; collective. ``model`` is the policy's."""
        if not self._every or step % self._every or not step:
            return
        own = self._policy.model.state_dict()  # the same memory
        for weight in full_weights(model, zero_stage):
            own[weight.name].copy_(weight.merged())

    def save(self, folder: Path) -> None:
        """Write what a checkpoint in ``folder`` needs. For rank 0."""
        if self._every:
            torch.save(self._policy.model.state_dict(), folder / STATE / FILE)

    def load(self, folder: Path) -> None:
        """Become what ``save`` has written; without a file it remains the initial model."""
        if (folder / STATE / FILE).is_file():
            self._policy.model.load_state_dict(torch.load(folder / STATE / FILE, map_location="cpu"))


def load_reference(spec: ExperimentSpec, model_dir: str, engine: Any) -> Unadapted | Copy | None:
    """The reference of a spec, which is the initial model; None when there is no penalty.

    ``model_dir`` has the initial model; ``engine`` is that of the policy.
    """
    algorithm = spec.algorithm
    if not algorithm.kl_coef:
        return None
    if spec.model.lora is not None and not algorithm.reference_update_every:
        return Unadapted(engine)
    from transformers import AutoModelForCausalLM

    trainer = spec.trainer
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, trainer.dtype), attn_implementation=trainer.attention
    )
    model = model.to(engine.device).eval().requires_grad_(False)
    return Copy(Policy(model, spec.rollout.sampling.temperature, trainer.packing), algorithm.reference_update_every)
