"""Supervised updates and held-out losses: the warm start before reinforcement learning (decision 0105).

The loss of an update is −Σ log p / n over all n learned tokens of its rows. Packing, micro-batches, log-probs and the
optimizer step are the ones of reinforcement learning. The policy's temperature must be 1.

Invariant: the loss and its gradient do not depend on the number of ranks and micro-batches, except for rounding.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from asyncrl_cli.records.generation import CONTEXT, TokenSequence
from asyncrl_cli.records.training import StepReport, SupervisedBatch, SupervisedRow
from asyncrl_cli.train import nonfinite_guard
from asyncrl_cli.train.algorithms.policy_loss import aggregate
from asyncrl_cli.train.algorithms.reduced_sums import sum_over_ranks
from asyncrl_cli.train.deepspeed_engine import set_learning_rate
from asyncrl_cli.train.model.sequence_parallel import data_group
from asyncrl_cli.train.packing import TrainingRow, count_tokens
from asyncrl_cli.train.precompute import Learner
from asyncrl_cli.train.step import plan_minibatch


def train_rows(learner: Learner, batch: SupervisedBatch) -> StepReport:
    """Make one optimizer update, or only measure the loss; collective over the ranks.

    Raises ``RunError`` when too many updates in a row were not finite.
    """
    started = time.monotonic()
    engine, trainer = learner.engine, learner.spec.trainer
    rows = [_training_row(row) for row in batch.rows]
    minibatch = plan_minibatch(learner, rows, learner.spec.trainer.microbatch_tokens)
    tokens = count_tokens(minibatch.rows)
    loss_sum = torch.zeros((), dtype=torch.float64, device=engine.device)
    for index, microbatch in enumerate(minibatch.microbatches):
        engine.set_gradient_accumulation_boundary(index == len(minibatch.microbatches) - 1)
        with torch.set_grad_enabled(batch.learning_rate is not None):
            logprobs = engine(microbatch.input_ids, microbatch.response_mask, **microbatch.model_arguments)
            # Divided by the ranks, because DeepSpeed averages gradients over them (update.py).
            loss = aggregate(-logprobs, microbatch.response_mask, "token_mean", tokens / trainer.ranks)
        if batch.learning_rate is not None:
            nonfinite_guard.backward(engine, loss)
        loss_sum += loss.detach()
        learner.finished_microbatches += 1
    metrics = {}
    if batch.learning_rate is not None:
        set_learning_rate(engine, batch.learning_rate)
        result = nonfinite_guard.step(engine)
        learner.limit.note(result)
        metrics["warm_start/learning_rate"] = batch.learning_rate
        if not result.skipped:
            metrics["warm_start/gradient_norm"] = result.norm
    loss = sum_over_ranks(loss_sum, data_group(trainer)) / trainer.ranks
    metrics["warm_start/loss"] = loss.item()
    return StepReport(metrics, seconds=time.monotonic() - started, trained_tokens=tokens)


def _training_row(row: SupervisedRow) -> TrainingRow:
    count = len(row.ids)
    tokens = TokenSequence(
        np.array(row.ids, np.int32),
        logprobs=np.zeros(count, np.float32),
        versions=np.where(row.learned, 0, CONTEXT).astype(np.int32),
    )
    turns = np.zeros(count, np.int32)
    return TrainingRow(tokens, version=0, on_policy=False, rollout=0, turns=turns, images=row.images)
