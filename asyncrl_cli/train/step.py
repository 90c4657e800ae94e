"""One training step: a batch of groups becomes one or more optimizer updates.

Every rank runs this with the same batch and plans the same micro-batches, so all of them make the same
number of collective calls. Losses of micro-batches add up to the mean of their minibatch exactly.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train import schedule
from asyncrl_cli.train.advantages import group_advantages
from asyncrl_cli.train.corrections import CorrectionSums, truncated_importance_weights
from asyncrl_cli.train.deepspeed_engine import set_learning_rate
from asyncrl_cli.train.losses import LossSums, policy_loss
from asyncrl_cli.train.packing import PaddedRows, TrainingRow, pad_rows, plan_microbatches
from asyncrl_cli.train.policy import Policy
from asyncrl_cli.train.records import StepReport, TrainingBatch, TrainingGroup

Microbatch = tuple[PaddedRows, Tensor | None]
"""Padded rows, and their log-probs under the weights at the start of the step (None: those of the update)."""


@dataclass(slots=True)
class _Sums:
    """What a step adds up over micro-batches, and then over ranks."""

    loss: Tensor
    losses: LossSums
    corrections: CorrectionSums
    engine_gap: CorrectionSums

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def training_rows(groups: Sequence[TrainingGroup], batch: TrainingBatch, spec: ExperimentSpec) -> list[TrainingRow]:
    """The rows that have something to teach, in the order of groups, rollouts and their sequences.

    Every sequence of a rollout has the rollout's advantage. Only tokens that the policy sampled count; those that
    were given to it are context.

    A token is on-policy when the trainer's weights at the start of the step are the very ones it was sampled
    with: those of its version, which the trainer has only in the first step after a publish. With ``keep``
    that takes a sequence whose sampled tokens are all of that version, as later tokens of another one saw keys and
    values of older weights.
    """
    at_a_version = batch.step % spec.pipeline.publish_every == 0
    keeps_cache = spec.pipeline.weight_update == "keep"
    if not groups:
        return []
    rewards = torch.tensor([group.rewards for group in groups], dtype=torch.float32)
    advantages = group_advantages(rewards, spec.algorithm.advantage == "group_norm")
    rows = []
    for group, group_advantage in zip(groups, advantages.tolist(), strict=True):
        if spec.algorithm.uniform_groups == "skip" and len(set(group.rewards)) == 1:
            continue
        for rollout, advantage in zip(group.rollouts, group_advantage, strict=True):
            for sequence in rollout.sequences:
                sampled = sequence.sampled
                if not sampled.any():
                    continue
                current = (sequence.versions == batch.version) & at_a_version
                whole = current[sampled].all()
                # What was given before the first sampled token is its prompt; what came after the last one is not read.
                first, last = np.flatnonzero(sampled)[[0, -1]]
                response = slice(first, last + 1)
                rows.append(
                    TrainingRow(
                        prompt_ids=(*sequence.prompt_ids, *sequence.response_ids[:first].tolist()),
                        response_ids=sequence.response_ids[response],
                        behaviour_logprobs=sequence.logprobs[response],
                        on_policy=(current & (whole or not keeps_cache))[response],
                        advantage=advantage,
                        loss_mask=sampled[response],
                    )
                )
    return rows


def train_batch(
    engine: Any, reference: Policy | None, spec: ExperimentSpec, batch: TrainingBatch, rank: int, updates: int
) -> tuple[StepReport, int]:
    """Train on one batch; returns the report and the number of optimizer updates of the run so far.

    ``engine`` is the DeepSpeed engine round a ``Policy``; collective over the ranks.
    """
    started = time.monotonic()
    trainer = spec.trainer
    size = len(batch.groups) // trainer.minibatches
    total_updates = spec.stop.steps * trainer.minibatches
    minibatches = []
    for first in range(0, size * trainer.minibatches, size):
        rows = training_rows(batch.groups[first : first + size], batch, spec)
        minibatches.append((rows, _microbatches(engine, spec, rows, rank)))

    sums: _Sums | None = None
    metrics = {"train/updates": 0.0}
    for rows, microbatches in minibatches:
        factor = schedule.factor(
            updates,
            total_updates,
            trainer.schedule.warmup_updates,
            trainer.schedule.kind,
            trainer.schedule.final_fraction,
        )
        set_learning_rate(engine, trainer.optimizer.learning_rate * factor)
        metrics["train/learning_rate"] = trainer.optimizer.learning_rate * factor
        updates += 1
        if not rows:  # every group was uniform: there is no direction to go
            continue
        update = _update(engine, reference, spec, rows, microbatches)
        sums = update if sums is None else sums + update
        metrics["train/updates"] += 1
        if (norm := engine.get_global_grad_norm()) is not None:  # ZeRO stage 0 does not tell
            metrics["train/gradient_norm"] = float(norm)
    if sums is not None:
        metrics |= _metrics(_over_ranks(sums, engine.device), trainer.ranks * metrics["train/updates"])
    trained = sum(row.loss_tokens for rows, _ in minibatches for row in rows)
    return StepReport(metrics, time.monotonic() - started, trained), updates


def load_reference(spec: ExperimentSpec, model_dir: str, device: torch.device) -> Policy | None:
    """The initial model, frozen and whole on every rank, for the KL penalty; None when there is none."""
    if not spec.algorithm.kl_coef:
        return None
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, spec.trainer.dtype))
    return Policy(model.to(device).eval().requires_grad_(False), spec.rollout.sampling.temperature)


def _microbatches(engine: Any, spec: ExperimentSpec, rows: list[TrainingRow], rank: int) -> list[Microbatch]:
    trainer = spec.trainer
    plan = plan_microbatches([len(row) for row in rows], trainer.tokens_per_microbatch, trainer.ranks)
    microbatches: list[Microbatch] = []
    for indices in plan[rank]:
        padded = pad_rows([rows[index] for index in indices], pad_id=0).to(engine.device)
        proximal = None
        if trainer.minibatches > 1:
            # Later updates move away from the policy that the step started with; the first one is at it.
            with torch.no_grad():
                proximal = engine(padded.input_ids, padded.response_mask)
        microbatches.append((padded, proximal))
    return microbatches


def _update(
    engine: Any,
    reference: Policy | None,
    spec: ExperimentSpec,
    rows: list[TrainingRow],
    microbatches: list[Microbatch],
) -> _Sums:
    algorithm = spec.algorithm
    count = len(rows) if algorithm.aggregation == "sequence_mean" else sum(row.loss_tokens for row in rows)
    # DeepSpeed averages gradients over ranks, the loss is a mean over all of them.
    denominator = count / spec.trainer.ranks
    total: _Sums | None = None
    for index, (padded, at_start) in enumerate(microbatches):
        engine.set_gradient_accumulation_boundary(index == len(microbatches) - 1)
        logprobs = engine(padded.input_ids, padded.response_mask)
        proximal = logprobs.detach() if at_start is None else at_start
        weights, corrections, engine_gap = _weights(spec, proximal, padded)
        reference_logprobs = None
        if reference is not None:
            with torch.no_grad():
                reference_logprobs = reference(padded.input_ids, padded.response_mask)
        loss, losses = policy_loss(
            logprobs,
            proximal,
            padded.advantages,
            padded.response_mask,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            aggregation=algorithm.aggregation,
            denominator=denominator,
            importance_weights=weights,
            reference_logprobs=reference_logprobs,
            kl_coef=algorithm.kl_coef,
        )
        engine.backward(loss)
        sums = _Sums(loss.detach().double(), losses, corrections, engine_gap)
        total = sums if total is None else total + sums
    engine.step()
    assert total is not None
    return total


def _weights(
    spec: ExperimentSpec, proximal: Tensor, padded: PaddedRows
) -> tuple[Tensor, CorrectionSums, CorrectionSums]:
    """Importance weights with their statistics, and those of the engine's numerics alone.

    In fp32 the two sides agree on a token of the version being trained to about 1e-5, and which way the last
    bits fall depends on how the engine happened to batch it. There the trainer's own log-prob stands for the
    engine's: the weight is exactly 1, and a run is reproducible to the bit.
    """
    mask, behaviour = padded.response_mask, padded.behaviour_logprobs
    _, engine_gap = truncated_importance_weights(proximal, behaviour, mask & padded.on_policy, None)
    if spec.trainer.dtype == spec.rollout.dtype == "float32":
        behaviour = torch.where(padded.on_policy, proximal, behaviour)
    weights, corrections = truncated_importance_weights(proximal, behaviour, mask, spec.algorithm.correction.cap)
    return weights, corrections, engine_gap


def _over_ranks(sums: _Sums, device: torch.device) -> _Sums:
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return sums
    parts = {"loss": sums.loss}
    for name in ("losses", "corrections", "engine_gap"):
        part = getattr(sums, name)
        parts |= {f"{name}.{field.name}": getattr(part, field.name) for field in fields(part)}
    for operation, wanted in ((torch.distributed.ReduceOp.MAX, True), (torch.distributed.ReduceOp.SUM, False)):
        names = [name for name in parts if name.endswith("_max") == wanted]
        packed = torch.stack([parts[name] for name in names]).to(device)
        torch.distributed.all_reduce(packed, operation)
        parts |= dict(zip(names, packed, strict=True))

    def collect(name: str) -> dict[str, Tensor]:
        return {key.partition(".")[2]: value for key, value in parts.items() if key.startswith(f"{name}.")}

    return _Sums(
        parts["loss"],
        LossSums(**collect("losses")),
        CorrectionSums(**collect("corrections")),
        CorrectionSums(**collect("engine_gap")),
    )


def _metrics(sums: _Sums, losses: float) -> dict[str, float]:
    gap = sums.engine_gap.summary()
    return {
        "train/loss": sums.loss.item() / losses,
        **{f"train/{name}": value for name, value in sums.losses.summary().items()},
        **{f"correction/{name}": value for name, value in sums.corrections.summary().items()},
        "engine/logprob_gap_mean": gap["logprob_gap_mean"],
        "engine/logprob_gap_max": gap["logprob_gap_max"],
    }
