"""The KL penalty's reference model: the initial model, or a teacher.

A reference is called like a ``Policy``; its callers switch gradients off. With adapters the initial model is the policy
without them, which takes no memory. Otherwise the reference is a separate model, sharded if ZeRO-3 shards the policy,
and complete on every rank if not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.deepspeed_engine import check, load_model, policy_around, without_optimizer
from asyncrl_cli.train.model.lora import without_adapters

Reference = Callable[..., Tensor]


def unadapted(engine: Any, input_ids: Tensor, response_mask: Tensor, **arguments: Any) -> Tensor:
    """Score with the policy without its adapters; see ``Policy.forward``. Collective."""
    with without_adapters(engine.module.model):
        logprobs: Tensor = engine(input_ids, response_mask, **arguments)
    return logprobs


def load_reference(spec: ExperimentSpec, model_dir: str, engine: Any) -> Reference | None:
    """Load a spec's reference: ``algorithm.reference_path``, or else the initial model; None without a penalty.

    ``model_dir``: the initial model's folder; ``engine``: the policy's. Collective. Raises ``UserError`` like
    ``check_policy``.
    """
    trainer, teacher = spec.trainer, spec.algorithm.reference_path
    if not spec.algorithm.kl_coef:
        return None
    if spec.model.lora is not None and teacher is None:
        return partial(unadapted, engine)
    folder = teacher or model_dir
    policy = policy_around(load_model(trainer, folder, spec.model.max_images > 0), spec, folder)
    policy.eval().requires_grad_(False)
    score: Reference = without_optimizer(policy, trainer) if trainer.zero_stage == 3 else policy.to(engine.device)
    if teacher is not None:
        check(policy, score, trainer)
        engine.module.shares_prefixes &= policy.shares_prefixes  # both get the same trees
    return score
