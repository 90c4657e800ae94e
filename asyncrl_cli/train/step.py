"""One training step: a batch of groups becomes one or more optimizer updates.

Every rank runs this with the same batch and plans the same micro-batches, so all ranks make the same number of
collective calls. The losses of micro-batches add up to their minibatch's mean exactly.

Read ``train_batch`` from top to bottom, then precompute.py and update.py; algorithms/__init__.py lists the formulas.
"""

from __future__ import annotations

import time

import torch

from asyncrl_cli.records.training import StepReport, TrainingBatch
from asyncrl_cli.spec.algorithm import RUNNING_BASELINE
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train import schedule
from asyncrl_cli.train.algorithms.reduced_sums import reduce_over_ranks
from asyncrl_cli.train.deepspeed_engine import set_learning_rate
from asyncrl_cli.train.flops import peak_flops
from asyncrl_cli.train.model.pass_layout import moved
from asyncrl_cli.train.model.sequence_parallel import data_group
from asyncrl_cli.train.packing import TrainingRow, count_tokens, microbatch, plan_microbatches, training_rows
from asyncrl_cli.train.precompute import Learner, Minibatch, precompute
from asyncrl_cli.train.prefix_trees import single_rows, trees_of_update
from asyncrl_cli.train.step_rewards import StepRewards
from asyncrl_cli.train.update import UpdateSums, update_critic, update_policy


def train_batch(learner: Learner, batch: TrainingBatch) -> StepReport:
    """Train on one batch.

    Collective over the ranks. Raises ``RunError`` when too many updates in a row were not finite.
    """
    started, processor = time.monotonic(), time.process_time()
    spec, trainer = learner.spec, learner.spec.trainer
    rewards = StepRewards.of(batch, spec)
    rows = training_rows(batch, rewards.uniform, spec)
    tokens = min(trainer.microbatch_tokens, batch.tokens_per_microbatch or trainer.microbatch_tokens)
    size = len(batch.groups) // trainer.minibatches
    minibatches = [
        plan_minibatch(learner, [row for group in rows[start : start + size] for row in group], tokens)
        for start in range(0, size * trainer.minibatches, size)
    ]
    per_step = trainer.epochs * trainer.minibatches
    keep_old = per_step > 1 and (spec.algorithm.correction.proximal == "recomputed" or _is_exact(spec))
    prepared = time.monotonic()
    precompute(learner, minibatches=minibatches, rewards=rewards, keep_old_logprobs=keep_old)
    scored = _time_of(learner.engine.device)

    sums: UpdateSums | None = None
    flops = 0.0
    uniform = rewards.uniform.double().mean().item()
    metrics = {"reward/uniform_groups": uniform, "train/updates": 0.0, "train/updates_skipped": 0.0}
    if tokens < trainer.microbatch_tokens:
        metrics["train/reduced_microbatch_tokens"] = float(tokens)
    if spec.algorithm.reward_parts:
        metrics["train/missing_parts"] = float(rewards.missing_parts)
    if spec.algorithm.advantage == RUNNING_BASELINE:
        metrics["train/baseline_groups"] = float(sum(bool(group.earlier) for group in batch.groups))
        metrics["train/baseline_error"] = (rewards.rollouts - rewards.baseline).abs().nanmean().item()
    is_first = True
    total_updates = (trainer.schedule.steps or spec.stop.total) * per_step
    # The position follows from the step, not from a count of updates: a resume may change the updates of a step.
    for update_index, minibatch in enumerate(minibatches * trainer.epochs, start=batch.step * per_step):
        factor = schedule.factor(update_index, total_updates, trainer.schedule)
        set_learning_rate(learner.engine, trainer.optimizer.learning_rate * factor)
        metrics["train/learning_rate"] = trainer.optimizer.learning_rate * factor
        # Every group was uniform: there is nothing to learn. ``rows`` are the rows of all ranks, so all skip or none:
        # a rank that skipped alone would miss collective calls.
        if not minibatch.rows:
            continue
        lengths = [len(row) - 1 for row in minibatch.rows]  # a row's last token is predicted, but not read
        shared = [length for tree in minibatch.trees for length in tree.shared]
        amounts = learner.engine.module.flops.amounts(lengths, count_tokens(minibatch.rows), shared)
        if learner.critic is not None:
            # After ``precompute``: this step's advantages must come from the critic before its update.
            metrics |= update_critic(learner, minibatch, factor)
            flops += amounts.times(learner.critic.module.flops.update)
            if batch.step < spec.algorithm.critic.warmup_steps:
                continue
        result, update = update_policy(learner, minibatch, is_first)
        flops += amounts.times(learner.engine.module.flops.update)
        learner.limit.note(result)
        if result.skipped:  # its sums may not be finite
            metrics["train/updates_skipped"] += 1
            continue
        sums = update if sums is None else sums + update
        is_first = False
        metrics["train/updates"] += 1
        metrics["train/gradient_norm"] = max(result.norm, metrics.get("train/gradient_norm", 0.0))
    updated = _time_of(learner.engine.device)
    if sums is not None:  # on all ranks or on none, like the skipped updates
        of_step = reduce_over_ranks(sums, learner.engine.device, data_group(trainer))
        metrics |= of_step.summary(trainer.ranks * metrics["train/updates"])
    trained = sum(count_tokens(minibatch.rows) for minibatch in minibatches)
    return StepReport(
        metrics,
        seconds=time.monotonic() - started,
        trained_tokens=trained,
        computed_tokens=sum(tree.positions for minibatch in minibatches for tree in minibatch.trees),
        forward_s=scored - prepared,
        update_s=updated - scored,
        cpu_s=time.process_time() - processor,
        flops=flops,
        peak_flops=_peak(spec, learner.engine.device),
    )


def _peak(spec: ExperimentSpec, device: torch.device) -> float | None:
    """Operations per second of this rank's GPU; None in float32, on a CPU and for an unknown GPU."""
    if device.type == "cpu" or spec.trainer.dtype != "bfloat16":
        return None
    return peak_flops(torch.cuda.get_device_name(device))


def _time_of(device: torch.device) -> float:
    """Time (s) after the device has done all work: a GPU's work is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


def _is_exact(spec: ExperimentSpec) -> bool:
    """True if equal rollouts must give equal bits. Every update then needs the trainer's own log-probs, because an
    engine's last bits depend on how it happened to batch."""
    pipeline = spec.pipeline
    float32 = spec.trainer.dtype == spec.rollout.dtype == "float32"
    return float32 and pipeline.max_staleness == 0 and pipeline.publish_every == 1


def plan_minibatch(learner: Learner, rows: list[TrainingRow], tokens: int) -> Minibatch:
    """Plan one optimizer update's micro-batches of at most ``tokens`` on all ranks, and make this rank's tensors."""
    trainer, policy = learner.spec.trainer, learner.engine.module
    shares = trainer.ranks // trainer.sequence_parallel
    trees = single_rows([len(row) for row in rows])
    # Rows with and without recorded experts are mixed after a resume that has changed ``router_replay``.
    if policy.shares_prefixes and len({row.tokens.experts is None for row in rows}) == 1:
        trees = trees_of_update([row.keys() for row in rows], trainer, tokens, policy.model.config)
    # The mask of joined trees has the square of all their positions, so with varlen trees are padded.
    packing = trainer.packing and not (trainer.attention == "varlen" and len(trees) < len(rows))
    plan = plan_microbatches([len(tree) for tree in trees], tokens_per_microbatch=tokens, ranks=shares, packing=packing)
    microbatches = []
    for indices in plan[learner.rank // trainer.sequence_parallel]:
        rows_on_cpu = microbatch(rows, [trees[index] for index in indices], learner.vision, packing, policy.sequence)
        microbatches.append(moved(rows_on_cpu, learner.engine.device))
    return Minibatch(rows, trees, microbatches)
