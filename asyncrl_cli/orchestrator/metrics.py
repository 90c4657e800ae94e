"""Computes the metrics of a step.

Names are ``area/quantity``; docs/metrics.md describes them. A name says whether it counts groups, rollouts or tokens.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from asyncrl_cli.inspect.health import HealthWatch
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.monitors.reporter import Reporter
from asyncrl_cli.orchestrator.prompt_source import PromptSource
from asyncrl_cli.records.generation import Rollout
from asyncrl_cli.records.groups import Counts, PublishRecord, StepRecord, TakenBatch
from asyncrl_cli.records.training import CORRECT, StepReport, TrainingBatch
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.spec.sharing import shares_gpus


class StepClock:
    """Measures the time between steps."""

    def __init__(self, client: GenerationClient) -> None:
        self._client = client
        self._lap_started = time.monotonic()
        self._totals = self._read()
        self._journal_s = 0.0

    def lap(self, report: StepReport, journal_s: float) -> dict[str, float]:
        """Metrics of the time since the last lap, with the step of ``report``. ``journal_s`` as in ``TakenBatch``."""
        now, totals = time.monotonic(), self._read()
        seconds = now - self._lap_started
        tokens, busy, paused, wall, sequence_s = (
            total - previous_total for total, previous_total in zip(totals, self._totals, strict=True)
        )
        self._lap_started, self._totals = now, totals
        journal_busy_s, self._journal_s = journal_s - self._journal_s, journal_s
        return {
            "tokens/generated": float(tokens),
            "tokens/generated_per_s": tokens / seconds,
            "time/step_s": seconds,
            "time/train_s": report.seconds,
            "time/forward_s": report.forward_s,
            "time/update_s": report.update_s,
            "share/trainer_busy": min(1.0, report.seconds / seconds),
            "share/engines_busy": (busy - paused) / wall if wall else 0.0,
            "share/engines_paused": paused / wall if wall else 0.0,
            "share/journal_busy": journal_busy_s / seconds,
            "engines/serving": float(len(self._client.serving())),
            "engines/requests_mean": sequence_s / busy if busy else 0.0,
            "cpu/trainer_s": report.cpu_s,
        }

    def _read(self) -> tuple[float, ...]:
        activity = self._client.activity
        times = activity.busy_s, activity.paused_s, activity.wall_s, activity.sequence_s
        return activity.generated_tokens, *times


class StepRecorder:
    """Reports every trained step once, in order, and has the buffer record it."""

    def __init__(
        self,
        spec: ExperimentSpec,
        *,
        client: GenerationClient,
        prompts: PromptSource,
        buffer: Buffer,
        reporter: Reporter,
        reported: int,
        history: Iterable[Mapping[str, float]] = (),
    ) -> None:
        """``reported``: number of steps that earlier drivers reported. ``history``: the steps' metrics."""
        self.reported = self._first_step = reported
        self.health = HealthWatch(spec.model_dump(mode="json"), history)
        self._spec = spec
        reporter.health(reported, changed=(), open_findings=self.health.open_findings)
        for finding in self.health.open_findings:
            reporter.warn(f"step {reported}: {finding.text}")
        self._publish_every = spec.pipeline.publish_every
        self._task_names = tuple(member.name for member in spec.task.mix)
        self._clock = StepClock(client)
        self._prompts = prompts
        self._buffer = buffer
        self._reporter = reporter
        self.extra_metrics: dict[str, float] = {}
        """Further metrics for the next report."""

    def report(
        self,
        taken_batch: TakenBatch,
        report: StepReport,
        published: PublishRecord | None,
        publish_s: float = 0.0,
        publish_wait_s: float = 0.0,
    ) -> None:
        """Report and record a trained step. ``publish_s``: seconds that the trainer spent on the publish
        after the step; ``publish_wait_s``: the part of them before it could write."""
        step, window = taken_batch.batch.step, self._clock.lap(report, taken_batch.journal_s)
        metrics = step_metrics(
            taken_batch.batch,
            report=report,
            published=published,
            window=window,
            counts=taken_batch.counts,
            names=self._task_names,
        )
        metrics |= speed_metrics(self._spec, report, window)
        metrics |= self.extra_metrics
        self.extra_metrics.clear()
        metrics["time/publish_s"] = publish_s
        metrics["time/publish_wait_s"] = publish_wait_s
        metrics |= self._prompts.metrics
        metrics["response/unknown_tokens"] = unknown_tokens(taken_batch.batch, self._prompts.encoder.vocabulary)
        self._reporter.stepped(step + 1, (step + 1) // self._publish_every, metrics, time.time())
        changed = self.health.step({**metrics, "step": step + 1})
        if changed:
            self._reporter.health(step + 1, changed, self.health.open_findings)
        self.reported = step + 1
        record = StepRecord(step, batch_digest(taken_batch.batch), metrics)
        self._buffer.trained(record, [(finding.rule, finding.text) for finding in changed])

    @property
    def steps_without_learning(self) -> int:
        """Steps in a row in which nothing was learned, if ``stop.on_unhealthy`` ends the run; 0 otherwise. A resumed
        run counts from 0."""
        limit = self._spec.stop.on_unhealthy
        steps = min(self.health.steps_without_learning, self.reported - self._first_step)
        return 0 if limit == "never" or steps < limit else steps


def batch_digest(batch: TrainingBatch) -> str:
    """A digest of a batch's prompts, responses and versions. Equal digests mean equal tokens and images."""
    digest = hashlib.blake2b(digest_size=16)
    for group in batch.groups:
        for rollout in group.rollouts:
            if rollout.branches:
                digest.update(len(rollout.branches).to_bytes(4, "little"))
            for sequence in rollout.sequences:
                for array in (np.asarray(sequence.prompt_ids, np.int32), sequence.ids, sequence.versions):
                    digest.update(len(array).to_bytes(4, "little") + array.astype("<i4").tobytes())
                for placed_image in sequence.images:
                    digest.update(placed_image.image.digest.encode())
    return digest.hexdigest()


def step_metrics(
    batch: TrainingBatch,
    report: StepReport,
    published: PublishRecord | None,
    window: Mapping[str, float],
    counts: Counts,
    names: Sequence[str] = (),
) -> dict[str, float]:
    """All metrics of one step, including ``window`` (from ``StepClock.lap``). ``names``: the tasks of a mix, where a
    prompt's uid is ``TASK/UID``."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    rewards = np.array([reward for group in batch.groups for reward in group.known_rewards])
    versions = [rollout.sampled_versions for rollout in rollouts]
    lengths = np.array([len(sampled) for sampled in versions])
    staleness = batch.version - np.concatenate(versions)
    crossed = [len(sampled) > 0 and sampled.min() != sampled.max() for sampled in versions]
    metrics = {**_task_metrics(batch, names), **window} | {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/correct": float((rewards >= CORRECT).mean()),
        "reward/masked_rollouts": float(len(rollouts) - len(rewards)),
        "response/tokens_mean": float(lengths.mean()),
        "response/tokens_max": float(lengths.max()),
        "response/truncated_ratio": float(np.mean([not rollout.finished for rollout in rollouts])),
        "staleness/groups_mean": float(np.mean(batch.staleness)),
        "staleness/groups_max": float(max(batch.staleness)),
        "staleness/tokens_mean": float(staleness.mean()),
        "staleness/tokens_max": float(staleness.max()),
        "staleness/rollouts_crossed": float(np.mean(crossed)),
        "tokens/trained": float(report.trained_tokens),
        "tokens/computed": float(report.computed_tokens),
        "buffer/groups_running": float(counts.running),
        "buffer/groups_finished": float(counts.finished),
        "buffer/groups_taken": float(counts.taken),
        "buffer/groups_rejected": float(counts.rejected),
        "buffer/groups_requeued": float(counts.requeued),
        "buffer/groups_late": float(counts.late),
    }
    if published is not None:
        metrics |= {
            "publish/seconds": published.seconds,
            "publish/write_s": published.write_s,
            "publish/transfer_s": published.transfer_s,
            "publish/stall_s": published.stall_s,
            "publish/probe_gap": published.gap,
            "publish/probe_change": published.change,
        }
    if episodes := [rollout for rollout in rollouts if not rollout.prompt_ids]:
        metrics |= {
            # A call of the policy is a contiguous span of sampled tokens.
            "response/calls_mean": float(np.mean([sum(map(_spans, rollout.sequences)) for rollout in episodes])),
            "response/branches_mean": float(np.mean([len(rollout.branches) for rollout in episodes])),
        }
    return metrics | report.metrics


def unknown_tokens(batch: TrainingBatch, vocabulary: int) -> float:
    """Share of a batch's sampled tokens that the tokenizer does not have. Its ids are below ``vocabulary``."""
    sequences = [sequence for group in batch.groups for rollout in group.rollouts for sequence in rollout.sequences]
    return float(np.mean(np.concatenate([sequence.ids[sequence.sampled] for sequence in sequences]) >= vocabulary))


def speed_metrics(spec: ExperimentSpec, report: StepReport, window: Mapping[str, float]) -> dict[str, float]:
    """A step's trained tokens per second, in total and per GPU of ranks and engines, and the trainer's MFU if its GPUs'
    data sheet is known."""
    rate, peak = report.trained_tokens / window["time/step_s"], report.peak_flops
    metrics = {"tokens/trained_per_s": rate, "train/tflop": report.flops / 1e12}
    gpus = float(spec.trainer.ranks if spec.trainer.gpus_per_rank else 0)
    if not shares_gpus(spec):  # otherwise the engines are on the ranks' GPUs
        gpus += window["engines/serving"] * spec.rollout.gpus_per_engine
    if gpus:
        metrics["tokens/trained_per_gpu_s"] = rate / gpus
    if peak is not None and report.update_s:
        for name, seconds in (("update", report.update_s), ("end_to_end", window["time/step_s"])):
            metrics[f"mfu/{name}"] = report.flops / (seconds * peak)
        metrics["mfu/peak_tflops"] = peak / 1e12
    return metrics


def _spans(sequence: Rollout) -> int:
    return int((sequence.sampled & np.diff(sequence.sampled, prepend=False)).sum())


def _task_metrics(batch: TrainingBatch, names: Sequence[str]) -> dict[str, float]:
    """Tasks' own metrics, averaged over the rollouts that have them, and the rewards of each task of a mix."""
    values_by_name: defaultdict[str, list[float]] = defaultdict(list)
    for group in batch.groups:
        for rollout_metrics in group.metrics:
            for name, value in rollout_metrics.items():
                values_by_name[f"task/{name}"].append(value)
        task = group.uid.partition("/")[0]
        if task in names:
            values_by_name[f"reward/{task}"] += group.known_rewards
            values_by_name[f"reward/{task}/correct"] += [reward >= CORRECT for reward in group.known_rewards]
    return {name: float(np.mean(values)) for name, values in values_by_name.items()}
