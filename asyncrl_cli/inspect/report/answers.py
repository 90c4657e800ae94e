"""A report's first answers: is the run healthy, did it learn, what limited its speed, was it ever too stale, and what
failed?

Learning: held-out accuracy decides if there is any, otherwise the training reward. Only evaluations on the same number
of prompts are compared, because these are the same prompts. The intervals are Wilson's, and Newcombe's for a difference
(1998, method 10), both at 95 %. Shared prompts make a real difference easier to see than these intervals say: they err
towards "inconclusive".

Speed: a step's window lasts from the end of the previous step to its own end. Time while the run was down belongs to no
window. Steps of ``StepTime`` count from 0, as in the journal.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from asyncrl_cli.core.intervals import wilson
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.inspect.health import HealthFinding
from asyncrl_cli.inspect.pages import number
from asyncrl_cli.inspect.resolved import value_at
from asyncrl_cli.journal.history import EvaluationRecord, StepSpan, checkpoints, first_publish, last_scores, starts
from asyncrl_cli.journal.staleness import Report, mean_age, together
from asyncrl_cli.plan.prediction import Prediction, advice

Tone = Literal["good", "bad", "plain"]

HEALTH_LINES = 12
"""Largest number of findings on the card about health."""
FEW_STEPS = 10
"""With fewer steps, the noise of the training reward cannot be estimated, and the start takes most of the time."""
SURE = 2.0
"""Two means differ beyond noise if they differ by more than this many standard errors."""


@dataclass(frozen=True, slots=True)
class AnswerCard:
    """A question with its answer, the evidence, and the remedy. ``tone``: good or bad news."""

    question: str
    answer: str
    tone: Tone
    details: tuple[str, ...] = ()


def _no_step(has_ended: bool) -> str:
    return "The run ended before its first step." if has_ended else "No step is trained yet."


def healthy(findings: Sequence[HealthFinding], steps: int, has_ended: bool) -> AnswerCard:
    """List the findings that last, then those that have ended. ``steps``: number of trained steps."""
    question = "Is it healthy?"
    if not steps:
        return AnswerCard(question, _no_step(has_ended), "plain")
    if not findings:
        return AnswerCard(question, f"Yes: no rule was broken in {counted(steps, 'step')}.", "good")
    # Findings that last and stop learning come first.
    worst, *other_findings = sorted(
        findings, key=lambda finding: (finding.last_step is not None, not finding.stops_learning)
    )
    answer = f"No: {worst.text}."
    tone: Tone = "bad"
    if worst.last_step is not None:
        other_findings, tone = list(findings), "plain"
        answer = f"Yes, in the newest of {counted(steps, 'step')}; before, a rule was broken."
    details = [f"{finding.summary[:1].upper()}{finding.summary[1:]}." for finding in other_findings[:HEALTH_LINES]]
    if len(other_findings) > HEALTH_LINES:
        details.append(f"And {len(other_findings) - HEALTH_LINES} more (`asyncrl inspect run`).")
    return AnswerCard(question, answer, tone, tuple(details))


def stale(report: Report, has_ended: bool) -> AnswerCard:
    """Say whether the bound on staleness held."""
    question = "Was it ever too stale?"
    bound = counted(report.progress.settings.max_staleness, "version")
    if not report.steps:
        return AnswerCard(question, _no_step(has_ended), "plain")
    if report.violations:
        rows, first_row = counted(len(report.violations), "row"), report.violations[0]
        return AnswerCard(question, f"YES: the guarantee is violated ({rows}); the first: {first_row.what}.", "bad")
    ages = together(report.steps).groups
    statistics = f"{number(mean_age(ages))} versions on average and {max(ages, default=0)} at most"
    if report.late:
        verdict = f"{report.late:,} groups were trained past the bound of {bound}, which on_stale: train allows"
        return AnswerCard(question, f"{verdict}; their staleness was {statistics}.", "bad")
    verdict = f"No: all {report.groups:,} groups kept the bound of {bound}"
    return AnswerCard(question, f"{verdict}; their staleness was {statistics}.", "good")


def failed(
    phase: str, reason: str, fault_counts: Mapping[str, int], first_fault: str, is_healthy: bool = True
) -> AnswerCard:
    """Name the failures: ``phase`` and ``reason`` of the run, ``fault_counts`` by kind, and the first fault."""
    question = "What failed?"
    ending = f"The run {phase}: {reason}. " if phase in ("failed", "died") and reason else ""
    if phase == "died" and not reason:
        ending = "The run's process died. "
    tone: Tone = "bad" if ending else "plain"
    if fault_counts:
        counts = ", ".join(f"{count} × {kind}" for kind, count in fault_counts.items())
        survived = "" if ending else " The run continued after each."
        return AnswerCard(question, f"{ending}Faults: {counts}; the first: {first_fault}.{survived}", tone)
    if ending:
        return AnswerCard(question, ending.strip(), tone)
    if not is_healthy:
        return AnswerCard(question, "No part had a fault, but the training is not healthy (see above).", tone)
    return AnswerCard(question, "Nothing: no part had a fault.", "good")


# -- what limited its speed?

TrainerPart = Literal["training", "publishing", "groups", "saving", "other"]
PART_NAMES: Mapping[TrainerPart, str] = {
    "training": "training",
    "publishing": "publishing weights",
    "groups": "waiting for groups",
    "saving": "saving checkpoints",
    "other": "other waits",
}
"""``groups``: the batch's last group had not been scored. ``other``: the batch was complete, and something else held up
the loop, such as an evaluation."""


class StepTime(NamedTuple):
    """The seconds of a step's window, by the trainer's activity."""

    step: int
    seconds: Mapping[TrainerPart, float]


def trainer_time(connection: sqlite3.Connection, spans: Sequence[StepSpan]) -> list[StepTime]:
    """Return the windows of trained steps, each with all of ``PART_NAMES``."""
    scored_at = last_scores(connection)
    saving_s = {checkpoint.after_step: checkpoint.stall_s for checkpoint in checkpoints(connection)}
    process_starts = [start.at for start in starts(connection)]
    initial = first_publish(connection)
    free_at = initial.finished_at if initial else None
    times = []
    for span in spans:
        requested_at = span.batch_taken_at if free_at is None else min(free_at, span.batch_taken_at)
        if any(requested_at < start_time < span.free_at for start_time in process_starts):
            requested_at = span.batch_taken_at  # the run was down, and caught up
        complete_at = min(max(scored_at.get(span.step) or requested_at, requested_at), span.batch_taken_at)
        other_s = span.batch_taken_at - complete_at
        saving = min(saving_s.get(span.step, 0.0), other_s)
        free_at = span.free_at
        published_from = min(span.publish.started_at, free_at) if span.publish else free_at
        seconds: dict[TrainerPart, float] = {
            "training": max(0.0, span.trained_until - span.batch_taken_at),
            "publishing": free_at - published_from,
            "groups": complete_at - requested_at,
            "saving": saving,
            "other": other_s - saving + published_from - span.trained_until,
        }
        times.append(StepTime(span.step, seconds))
    return times


def trainer_shares(times: Sequence[StepTime]) -> Mapping[TrainerPart, float]:
    """Return the shares of the entire run, which add up to 1; empty before the first trained step.

    The first step always waits for the very first rollouts, so it counts only in short runs.
    """
    times = times[1:] if len(times) >= FEW_STEPS else times
    spent = {activity: math.fsum(time.seconds[activity] for time in times) for activity in PART_NAMES}
    total = math.fsum(spent.values())
    return {activity: seconds / total for activity, seconds in spent.items()} if total else {}


def limited(predicted: Prediction | str, shares: Mapping[TrainerPart, float], has_ended: bool) -> AnswerCard:
    """Say which part limited the speed, and how to make the run faster.

    Args:
        predicted: the prediction for the run, or the reason why there is none.
        shares: the trainer's time; empty before the first step.
    """
    question = "What limited its speed?"
    if not shares:
        return AnswerCard(question, _no_step(has_ended), "plain")
    largest_first = sorted(
        (activity for activity in PART_NAMES if shares[activity] >= 0.005), key=lambda activity: -shares[activity]
    )
    breakdown = ", ".join(f"{PART_NAMES[activity]} {shares[activity]:.0%}" for activity in largest_first)
    evidence = f"The trainer's time: {breakdown}."
    if isinstance(predicted, str):
        return AnswerCard(question, f"No advice: {predicted}.", "plain", (evidence,))
    step_s, sync_s = predicted.outcome.step_s, predicted.sync.step_s
    limit, *details = advice(predicted)
    simulated = f"A step takes {step_s:.3g} s in the simulation; without staleness {sync_s:.3g} s."
    return AnswerCard(question, limit, "plain", (*details, simulated, evidence))


# -- did it learn?

Direction = Literal["rose", "fell", "did not change beyond its noise"]


def change(earlier: EvaluationRecord, later: EvaluationRecord) -> Direction:
    """Compare the accuracies of two evaluations, and ignore differences within their noise."""
    first_interval = wilson(earlier.accuracy, earlier.prompts)
    last_interval = wilson(later.accuracy, later.prompts)
    difference = later.accuracy - earlier.accuracy
    if difference > math.hypot(later.accuracy - last_interval[0], first_interval[1] - earlier.accuracy):
        return "rose"
    if -difference > math.hypot(earlier.accuracy - first_interval[0], last_interval[1] - later.accuracy):
        return "fell"
    return "did not change beyond its noise"


class Trend(NamedTuple):
    """The means of the first and the last tenth of some values, and whether they differ beyond the values' noise."""

    first: float
    last: float
    direction: Direction


def trend(values: Sequence[float]) -> Trend | None:
    """Return the trend of values with independent noise, or None for fewer than two values."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return None
    size = max(1, len(finite) // 10)
    first_mean, last_mean = math.fsum(finite[:size]) / size, math.fsum(finite[-size:]) / size
    # Noise is measured between neighbours, because the trend itself must not count as noise.
    squares = [(later - earlier) ** 2 for earlier, later in pairwise(finite)]
    error = math.sqrt(math.fsum(squares) / (2 * len(squares)) * 2 / size)
    if abs(last_mean - first_mean) <= SURE * error:
        return Trend(first_mean, last_mean, "did not change beyond its noise")
    return Trend(first_mean, last_mean, "rose" if last_mean > first_mean else "fell")


def learned(
    rewards: Sequence[float],
    evaluations: Sequence[EvaluationRecord],
    spec: Mapping[str, Any],
    has_ended: bool = False,
    findings: Sequence[HealthFinding] = (),
) -> AnswerCard:
    """Say whether the run learned. ``rewards``: the mean training reward of each step. ``findings`` of its health that
    last take precedence over an inconclusive comparison."""
    question = "Did it learn?"
    if not rewards and has_ended:
        return AnswerCard(question, _no_step(has_ended), "plain")
    series = leading_series(evaluations)
    tone: Tone
    verdict, tone = _by_accuracy(series) if series else ("", "plain")
    if not verdict:
        verdict, tone = _by_reward(rewards, spec)
    elif reward := trend(rewards):
        caveat = " (not comparable over the steps)" if not_comparable(spec) else ""
        tenths = f"{reward.first:.3f} to {reward.last:.3f}, first and last tenth of the steps."
        verdict = f"{verdict} Mean training reward{caveat}: {tenths}"
    broken = next((finding for finding in findings if finding.stops_learning and finding.last_step is None), None)
    if broken is not None and rewards and tone != "bad":
        since = f"{broken.observation}, since step {broken.first_step}."
        if tone == "good" or verdict.startswith("Yes"):
            verdict, tone = f"{verdict} But {since}", "plain"
        else:
            comparison = verdict.removeprefix("Inconclusive: ")
            verdict, tone = f"No: {since} {comparison[:1].upper()}{comparison[1:]}", "bad"
    return AnswerCard(question, verdict, tone)


def leading_series(evaluations: Sequence[EvaluationRecord]) -> list[EvaluationRecord]:
    """Return the evaluations on which the answer rests, by step: greedy, or otherwise the most frequent kind."""
    ordered = sorted(evaluations, key=attrgetter("kind", "after_step"))
    kinds = {name: list(series) for name, series in groupby(ordered, attrgetter("kind"))}
    repeated = [series for series in kinds.values() if len(series) > 1]
    return kinds["greedy"] if len(kinds.get("greedy", ())) > 1 else max(repeated, key=len, default=[])


def with_interval(evaluation: EvaluationRecord) -> str:
    """Format an accuracy with its interval and the number of prompts."""
    low, high = wilson(evaluation.accuracy, evaluation.prompts)
    return f"{evaluation.accuracy:.3f} ({low:.3f} to {high:.3f}, {evaluation.prompts:,} prompts)"


def _by_accuracy(series: Sequence[EvaluationRecord]) -> tuple[str, Tone]:
    """Compare the first and the last evaluation on the same prompts; empty if no two have the same number."""
    by_prompts: dict[int, list[EvaluationRecord]] = {}
    for evaluation in series:
        by_prompts.setdefault(evaluation.prompts, []).append(evaluation)
    comparable = [by_prompts[prompts] for prompts in sorted(by_prompts, reverse=True) if len(by_prompts[prompts]) > 1]
    if not comparable:
        return "", "plain"
    # Compare the evaluations that span most of the run; the ones with the most prompts if there are several such sets.
    compared = max(comparable, key=lambda same: same[-1].after_step - same[0].after_step)
    start, end = compared[0], compared[-1]
    measure = f"held-out accuracy ({start.kind})"
    went = f"from {with_interval(start)} at step {start.after_step} to {with_interval(end)} at step {end.after_step}."
    match change(start, end):
        case "rose":
            return f"Yes: {measure} rose {went}", "good"
        case "fell":
            return f"No: {measure} fell {went}", "bad"
    return f"Inconclusive: {measure} did not change beyond its noise, {went}", "plain"


def _by_reward(rewards: Sequence[float], spec: Mapping[str, Any]) -> tuple[str, Tone]:
    reward = trend(rewards)
    if reward is None:
        return "Inconclusive: too few steps are trained.", "plain"
    finite = [f"{value:.3f}" for value in rewards if math.isfinite(value)]
    if len(finite) < FEW_STEPS:
        by_step = f"only {counted(len(finite), 'step')} trained. Mean training reward by step: {', '.join(finite)}."
        return f"Inconclusive: {by_step}", "plain"
    went = f"{reward.first:.3f} to {reward.last:.3f} (first and last tenth of the steps)"
    basis = "There are no two held-out evaluations to compare, so this is based on the training reward."
    if reasons := not_comparable(spec):
        return (
            f"Inconclusive: the mean training reward went from {went}, but its steps are not comparable: "
            f"{'; '.join(reasons)}. Held-out evaluations would answer it.",
            "plain",
        )
    verdicts: dict[Direction, tuple[str, Tone]] = {"rose": ("Yes", "good"), "fell": ("No", "bad")}
    verdict, tone = verdicts.get(reward.direction, ("Inconclusive", "plain"))
    comma = "" if reward.direction in verdicts else ","
    return f"{verdict}: the mean training reward {reward.direction}{comma} from {went}. {basis}", tone


def not_comparable(spec: Mapping[str, Any]) -> list[str]:
    """Return the reasons why different steps use different kinds of prompts, so their rewards cannot be compared."""
    reasons = {
        "data.filter leaves out solved prompts": value_at(spec, "data.filter"),
        "algorithm.uniform_groups: reject leaves out groups that are all correct or all wrong": value_at(
            spec, "algorithm.uniform_groups"
        )
        == "reject",
    }
    return [reason for reason, applies in reasons.items() if applies]
