"""The KL penalty's reference model: the initial model, a teacher, or an earlier state of the policy.

A reference is called like a ``Policy``, without gradient. With adapters the initial model is the policy without them,
which takes no memory. Otherwise the reference is a separate model, sharded if ZeRO-3 shards the policy, and complete on
every rank if not.

With ``algorithm.reference_update_every`` the policy is copied into it every so many steps. A resumed run needs the same
reference, so it is saved in the checkpoint:

    state/reference.pt      the weights, unless they are the initial model's
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl_cli.runs.checkpoints import STATE
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.checkpoints import reading_tensors
from asyncrl_cli.train.deepspeed_engine import check, load_model, policy_around, without_optimizer
from asyncrl_cli.train.model.lora import full_weights, gathered, plain_weights, without_adapters

FILE = "reference.pt"


class Unadapted:
    """The policy without its adapters."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __call__(self, input_ids: Tensor, response_mask: Tensor, **arguments: Any) -> Tensor:
        """See ``Policy.forward``; collective."""
        with torch.no_grad(), without_adapters(self._engine.module.model):
            logprobs: Tensor = self._engine(input_ids, response_mask, **arguments)
        return logprobs


class Copy:
    """A separate model."""

    def __init__(self, score: Any, model: nn.Module, zero_stage: int, every: int = 0) -> None:
        """``score`` calls the ``Policy`` around ``model``, a transformers model. ``every``: steps between refreshes; 0:
        never."""
        self._score = score
        self._model = model
        self._zero_stage = zero_stage
        self._every = every

    def __call__(self, input_ids: Tensor, response_mask: Tensor, **arguments: Any) -> Tensor:
        """See ``Policy.forward``; collective under ZeRO-3."""
        with torch.no_grad():
            logprobs: Tensor = self._score(input_ids, response_mask, **arguments)
        return logprobs

    def before_step(self, step: int, model: nn.Module) -> None:
        """Copy the policy's ``model`` if a refresh is due before ``step``; collective."""
        if not self._every or step % self._every or not step:
            return
        weights = self._weights()
        for weight in full_weights(model, self._zero_stage):
            with gathered([weights[weight.name]], self._zero_stage, writer=0), torch.no_grad():
                weights[weight.name].copy_(weight.merged())

    def state(self, folder: Path, rank: int) -> dict[Path, dict[str, Tensor]]:
        """Return a copy of the weights for a checkpoint in ``folder``, by their file's path; collective. Only rank 0
        returns one."""
        if not self._every:
            return {}
        state = {}
        for weight in full_weights(self._model, self._zero_stage):
            if rank == 0:
                state[weight.name] = weight.parameter.detach().cpu().clone()
        return {folder / STATE / FILE: state} if rank == 0 else {}

    def load(self, folder: Path) -> None:
        """Load the weights that ``state`` returned. Keeps the initial model without a file, or if the reference is not
        refreshed any more: the next checkpoint would not have it. Collective."""
        if not self._every or not (folder / STATE / FILE).is_file():
            return
        with reading_tensors(folder):
            state = torch.load(folder / STATE / FILE, map_location="cpu", mmap=True)
        for name, weight in self._weights().items():
            with gathered([weight], self._zero_stage, writer=0), torch.no_grad():
                weight.copy_(state[name])

    def _weights(self) -> dict[str, Tensor]:
        return {weight.name: weight.parameter for weight in plain_weights(self._model)}


def load_reference(spec: ExperimentSpec, model_dir: str, engine: Any) -> Unadapted | Copy | None:
    """Load a spec's reference: ``algorithm.reference_path``, or else the initial model; None without a penalty.

    ``model_dir``: the initial model's folder; ``engine``: the policy's. Collective. Raises ``UserError`` like
    ``check_policy``.
    """
    algorithm = spec.algorithm
    if not algorithm.kl_coef:
        return None
    teacher = algorithm.reference_path
    if spec.model.lora is not None and not algorithm.reference_update_every and teacher is None:
        return Unadapted(engine)
    trainer = spec.trainer
    policy = policy_around(
        load_model(trainer, teacher or model_dir, spec.model.max_images > 0), spec, teacher or model_dir
    )
    policy.eval().requires_grad_(False)
    score = without_optimizer(policy, trainer) if trainer.zero_stage == 3 else policy.to(engine.device)
    if teacher is not None:
        check(policy, score, trainer)
        engine.module.shares_prefixes &= policy.shares_prefixes  # both get the same trees
    return Copy(score, model=policy.model, zero_stage=trainer.zero_stage, every=algorithm.reference_update_every)
