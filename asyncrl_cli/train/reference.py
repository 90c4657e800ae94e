"""The reference model of the KL penalty: the initial model, frozen and whole on every rank."""

from __future__ import annotations

import torch

from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.policy import Policy


def load_reference(spec: ExperimentSpec, model_dir: str, device: torch.device) -> Policy | None:
    """The initial model, for the KL penalty; None when there is none."""
    if not spec.algorithm.kl_coef:
        return None
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, spec.trainer.dtype))
    return Policy(model.to(device).eval().requires_grad_(False), spec.rollout.sampling.temperature)
