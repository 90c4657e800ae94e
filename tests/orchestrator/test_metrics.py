"""The metrics of a step: shares of time, and numbers computed from tokens and rewards."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_ins import client_over, rollout, spec

from asyncrl_cli.inspect.health import HealthFinding
from asyncrl_cli.orchestrator.metrics import (
    StepClock,
    StepRecorder,
    batch_digest,
    speed_metrics,
    step_metrics,
    unknown_tokens,
)
from asyncrl_cli.records.generation import EngineActivity, Rollout, branch_id
from asyncrl_cli.records.groups import Counts, PublishRecord, TakenBatch
from asyncrl_cli.records.training import StepReport, TrainingBatch, TrainingGroup
from asyncrl_cli.spec.sections import ExperimentSpec


class Clock:
    """A simulated clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def window(
    seconds: float,
    tokens: float,
    train_s: float,
    trainer: float,
    engines: float,
    paused: float,
    journal: float,
    serving: float,
) -> dict[str, float]:
    """Metrics of a window. The numbers are times, the four before the last are shares."""
    return {
        "tokens/generated": tokens,
        "tokens/generated_per_s": tokens / seconds,
        "time/step_s": seconds,
        "time/train_s": train_s,
        "share/trainer_busy": trainer,
        "share/engines_busy": engines,
        "share/engines_paused": paused,
        "share/journal_busy": journal,
        "engines/serving": serving,
        **dict.fromkeys(("time/forward_s", "time/update_s", "engines/requests_mean"), 0.0),
        "cpu/trainer_s": 0.0,
    }


def test_windows_divide_the_time_between_two_steps(clock: Clock) -> None:
    client = client_over(2)
    leaving, staying = client.engines
    leaving.activity = EngineActivity(900, 9.0, 9.0, 9.0, sequence_s=100.0)
    steps = StepClock(client)  # time before the clock's creation does not count
    clock.now += 10.0
    leaving.activity = EngineActivity(1000, 15.0, 10.0, 19.0, sequence_s=160.0)
    staying.activity = EngineActivity(50, 4.0, 1.0, 10.0, sequence_s=12.0)
    engines = (6.0 - 1.0 + 4.0 - 1.0) / 20.0
    work = {"time/forward_s": 0.5, "time/update_s": 1.5, "cpu/trainer_s": 6.0}
    metrics = steps.lap(StepReport(seconds=2.5, forward_s=0.5, update_s=1.5, cpu_s=6.0), 3.0)
    expected = window(10.0, 150, 2.5, 0.25, engines, 2.0 / 20.0, 0.3, 2) | work
    assert metrics == pytest.approx(expected | {"engines/requests_mean": (60 + 12) / (6 + 4)})
    clock.now += 4.0
    leaving.serving = False
    staying.activity = EngineActivity(60, 8.0, 1.0, 14.0, sequence_s=12.0)
    assert steps.lap(StepReport(seconds=5.0), 4.0) == window(4.0, 10, 5.0, 1.0, 1.0, 0.0, 0.25, 1)


GROUPS = (
    TrainingGroup(4, "a", 1, (rollout("4-0", (1, 1)), rollout("4-1", (1, 2, 3, 3), finished=False)), (1.0, 0.5)),
    TrainingGroup(6, "b", 2, (rollout("6-0", (3,)), rollout("6-1", (2, 2, 2))), (0.0, 1.5)),
)
BATCH = TrainingBatch(7, 3, GROUPS)
WINDOW = window(2.0, 500.0, 1.5, 0.5, 0.25, 0.125, 0.0625, 2.0)


COUNTS = Counts(0, 0, 0, 0, 0, 0)


def test_sampled_tokens_that_the_tokenizer_lacks_are_counted() -> None:
    ids = [token for group in GROUPS for rollout in group.rollouts for token in rollout.ids.tolist()]
    for vocabulary in range(max(ids) + 2):
        assert unknown_tokens(BATCH, vocabulary) == sum(token >= vocabulary for token in ids) / len(ids)


def test_the_numbers_of_a_step() -> None:
    metrics = step_metrics(
        batch=BATCH,
        report=StepReport({"loss/policy": 0.125}, seconds=1.5, trained_tokens=9, computed_tokens=31),
        published=PublishRecord(4, 4, "c", 0.5, 0.25, gap=1e-5, change=0.01, write_s=0.03, transfer_s=0.04),
        window=WINDOW,
        counts=Counts(running=1, finished=2, taken=16, rejected=3, requeued=4, late=5),
    )
    expected = {
        "reward/std": 0.3125**0.5,
        "reward/mean": 0.75,
        "reward/correct": 0.5,
        "reward/masked_rollouts": 0,
        "response/tokens_mean": 2.5,
        "response/tokens_max": 4,
        "response/truncated_ratio": 0.25,
        "staleness/groups_mean": 1.5,
        "staleness/groups_max": 2,
        "staleness/tokens_mean": (2 + 2 + 2 + 1 + 0 + 0 + 0 + 1 + 1 + 1) / 10,
        "staleness/tokens_max": 2,
        "staleness/rollouts_crossed": 0.25,
        "tokens/trained": 9,
        "tokens/computed": 31,
        **WINDOW,
        "buffer/groups_running": 1,
        "buffer/groups_finished": 2,
        "buffer/groups_taken": 16,
        "buffer/groups_rejected": 3,
        "buffer/groups_requeued": 4,
        "buffer/groups_late": 5,
        "publish/seconds": 0.5,
        "publish/write_s": 0.03,
        "publish/transfer_s": 0.04,
        "publish/stall_s": 0.25,
        "publish/probe_gap": 1e-5,
        "publish/probe_change": 0.01,
        "loss/policy": 0.125,
    }
    assert metrics == pytest.approx(expected)
    assert all(type(value) is float for value in metrics.values()), "JSON and MLflow do not accept numpy numbers"


def episode(name: str, *sequences: tuple[int, ...]) -> Rollout:
    """A rollout with sequences of these versions."""
    root, *branches = (replace(rollout(branch_id(name, at), of), prompt_ids=()) for at, of in enumerate(sequences))
    return replace(root, branches=tuple(branches))


def test_context_tokens_count_in_no_metric_of_an_episode() -> None:
    groups = (
        TrainingGroup(
            *(4, "sums/a", 1),
            (episode("4-0", (-1, -1, 1, -1, 3, 3)), episode("4-1", (-1, 2, 2), (-1, 1, -1, -1, 2, -1))),
            *((1.0, 0.0), ({"turns": 2.0}, {"turns": 4.0, "late": 1.0})),
        ),
        TrainingGroup(5, "words/a", 3, (rollout("5-0", (3,)), rollout("5-1", (3, 3))), (0.5, 0.0)),
    )
    metrics = step_metrics(TrainingBatch(7, 3, groups), StepReport(), None, WINDOW, COUNTS, ("sums", "words", "none"))
    assert {
        "reward/mean": 0.375,
        "reward/sums": 0.5,
        "reward/sums/correct": 0.5,
        "reward/words": 0.25,
        "reward/words/correct": 0.0,
        "response/tokens_mean": (3 + 4 + 1 + 2) / 4,
        "response/tokens_max": 4,
        "response/calls_mean": (2 + 3) / 2,
        "response/branches_mean": 0.5,
        "staleness/tokens_mean": (2 + 0 + 0 + 1 + 1 + 2 + 1) / 10,
        "staleness/tokens_max": 2,
        "staleness/rollouts_crossed": 0.5,
        "task/turns": 3,
        "task/late": 1,
    }.items() <= metrics.items()
    assert not [name for name in metrics if "none" in name]
    assert all(type(value) is float for value in metrics.values())


def test_masked_rollouts_are_counted_but_not_in_reward_means() -> None:
    groups = (replace(GROUPS[0], uid="sums/a", rewards=(None, 0.5)), replace(GROUPS[1], rewards=(3.5, None)))
    metrics = step_metrics(TrainingBatch(7, 3, groups), StepReport(), None, WINDOW, COUNTS, ("sums",))
    assert (metrics["reward/mean"], metrics["reward/correct"], metrics["reward/masked_rollouts"]) == (2.0, 0.5, 2.0)
    assert (metrics["reward/sums"], metrics["reward/sums/correct"]) == (0.5, 0.0)
    assert metrics["response/tokens_mean"] == 2.5, "they were generated"


def test_the_digest_depends_on_which_sequences_form_a_rollout() -> None:
    one, other = (1, -1, 2), (-1, 2)
    pairs = [
        (episode("4-0", one, other), episode("4-1", one)),
        (episode("4-0", one), episode("4-1", other, one)),
        (episode("4-0", one, one), episode("4-1", other)),
        (episode("4-0", one), episode("4-1", one)),
    ]
    digests = {batch_digest(TrainingBatch(7, 3, (replace(GROUPS[0], rollouts=pair),))) for pair in pairs}
    assert len(digests) == len(pairs)


def test_batches_have_the_same_digest_exactly_when_their_tokens_are_the_same() -> None:
    first, second = GROUPS[0].rollouts
    variants = [
        (replace(first, ids=first.ids + np.int32(1)), second),
        (replace(first, versions=first.versions - np.int32(1)), second),
        (replace(first, prompt_ids=(1, 3)), second),
        (second, first),
        (  # the same numbers in the same order, with a boundary at another position
            replace(first, ids=first.ids[:1], logprobs=first.logprobs[:1], versions=first.versions[:1]),
            replace(second, prompt_ids=(*first.ids[1:].tolist(), *second.prompt_ids)),
        ),
    ]
    digests = {batch_digest(BATCH)}
    for rollouts in variants:
        digests.add(batch_digest(TrainingBatch(7, 3, (replace(GROUPS[0], rollouts=rollouts), GROUPS[1]))))
    assert len(digests) == 1 + len(variants)
    wide = replace(first, ids=first.ids.astype(np.int64))
    again = TrainingBatch(7, 3, (replace(GROUPS[0], rollouts=(wide, second)), GROUPS[1]))
    assert batch_digest(again) == batch_digest(BATCH)
    assert batch_digest(BATCH) == "4281b4609f473cdf72d34fa67c6801d4", "digests of different releases are comparable"


class Recorded:
    """A buffer, a source of prompts and a reporter that keep nothing."""

    metrics: Mapping[str, float] = MappingProxyType({})
    encoder = SimpleNamespace(vocabulary=100)

    def stepped(self, *_: Any) -> None: ...

    def __init__(self) -> None:
        self.findings: list[tuple[str, int, int | None]] = []
        self.warned: list[str] = []
        self.rows: list[tuple[str, str]] = []

    def warn(self, text: str) -> None:
        self.warned.append(text)

    def health(self, _: int, changed: Sequence[HealthFinding], open_findings: Sequence[HealthFinding]) -> None:
        self.open_findings = [finding.rule for finding in open_findings]
        self.findings += [
            (finding.rule, finding.first_step, finding.last_step) for finding in changed if finding.rule == "no_updates"
        ]

    def trained(self, record: Any, findings: Sequence[tuple[str, str]]) -> None:
        self.rows += [row for row in findings if row[0] == "no_updates"]


def test_findings_begin_and_end_once_also_after_a_resume() -> None:
    reports: Any = Recorded()
    learns = spec(algorithm={"advantage": "gae", "critic": {"warmup_steps": 5}})

    def recorder(history: list[dict[str, float]]) -> StepRecorder:
        return StepRecorder(
            learns,
            client=client_over(1),
            prompts=reports,
            buffer=reports,
            reporter=reports,
            reported=len(history),
            history=history,
        )

    def train(steps: StepRecorder, first: int, last: int, updates: float) -> None:
        for step in range(first, last + 1):
            batch = replace(BATCH, step=step - 1)
            steps.report(TakenBatch(batch, COUNTS, 0.0), StepReport({"train/updates": updates}), None, 0)

    before = recorder([])
    train(before, 1, 7, 0.0)  # in the first 5 steps only the critic is trained
    assert not reports.findings
    train(before, 8, 12, 0.0)
    assert reports.findings == [("no_updates", 6, None)]
    ((_, message),) = reports.rows
    assert "no weight changed, since step 6. " in message
    after = recorder([{"step": step, "train/updates": 0.0} for step in range(1, 13)])
    assert reports.open_findings == ["no_updates"]
    assert [text.partition(". ")[0] for text in reports.warned] == ["step 12: no weight changed, since step 6"]
    train(after, 13, 14, 0.0)
    train(after, 15, 17, 1.0)
    assert reports.findings[1:] == [("no_updates", 6, 14)]


def gpu_spec(ranks: int, gpus: float) -> ExperimentSpec:
    smallest = spec()
    trainer = smallest.trainer.model_copy(update={"ranks": ranks, "gpus_per_rank": gpus})
    rollout = smallest.rollout.model_copy(update={"gpus_per_engine": gpus})
    return smallest.model_copy(update={"trainer": trainer, "rollout": rollout})


REPORT = StepReport(seconds=4.0, update_s=2.0, trained_tokens=900, flops=6e15, peak_flops=6e15)
STEP = {"time/step_s": 10.0, "engines/serving": 3.0}


def test_mfu_is_the_share_of_the_peak_in_updates_and_in_the_step() -> None:
    assert speed_metrics(gpu_spec(2, 1), REPORT, STEP) == {
        "tokens/trained_per_s": 90.0,
        "tokens/trained_per_gpu_s": 18.0,
        "train/tflop": 6000.0,
        "mfu/update": 0.5,
        "mfu/end_to_end": 0.1,
        "mfu/peak_tflops": 6000.0,
    }


def test_an_engine_and_a_rank_that_share_a_gpu_count_as_one() -> None:
    assert speed_metrics(gpu_spec(3, 0.5), REPORT, STEP)["tokens/trained_per_gpu_s"] == 30.0
