"""What a report says first, in sentences: did the run learn, what limited its speed, was it ever too stale, and what
failed.

Learning: held-out accuracy decides where there is any; training reward otherwise. Held-out accuracy is a share of
prompts, so its uncertainty follows from their number: intervals are Wilson's, differences of two evaluations
Newcombe's (1998, method 10), both at 95 %. Evaluations share their prompts, which makes a real difference easier to see
than these intervals say: they err towards "inconclusive".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, Literal

from asyncrl_cli.inspect.pages import number
from asyncrl_cli.inspect.report.bottleneck import FEW_STEPS, Bottleneck
from asyncrl_cli.inspect.resolved import value_at
from asyncrl_cli.inspect.staleness_page import mean_age
from asyncrl_cli.journal.events import Evaluation
from asyncrl_cli.journal.staleness import Report, together
from asyncrl_cli.plan.prediction import Prediction

Tone = Literal["good", "bad", "plain"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A question and its answer, the evidence, and what to do; ``tone``: whether that is good news."""

    question: str
    answer: str
    tone: Tone
    more: tuple[str, ...] = ()


def limited(found: Bottleneck | None) -> Answer:
    """What limited the speed, and what to change."""
    question = "What limited its speed?"
    if found is None:
        return Answer(question, "No step is trained yet.", "plain")
    return Answer(question, found.sentence, "plain", (found.breakdown, found.advice))


def other_settings(found: Prediction | None) -> Answer:
    """How fast the run would be with other settings, simulated."""
    question = "How fast would it be with other settings?"
    if found is None:
        return Answer(question, "Not known: the simulator does not reproduce the recorded steps within 10 %.", "plain")
    changes = [
        f"With {change.setting} a step would take {change.gain:.0%} less ({change.step_s:.3g} s)."
        for change in found.changes
    ]
    spans = ", ".join(f"{factor - 1:+.0%}: {step_s:.3g} s" for factor, step_s in found.spans.items())
    return Answer(
        question,
        f"A simulated step takes {found.outcome.step_s:.3g} s, {found.ratio_to_sync:.2f} times as fast as without "
        f"staleness; max_staleness {found.free} is the smallest that costs no time.",
        "plain",
        (*(changes or ["No other setting that was tried saves 3 %."]), f"With other lengths of responses: {spans}."),
    )


def stale(report: Report) -> Answer:
    """Whether the bound on staleness held."""
    question = "Was it ever too stale?"
    settings = report.progress.settings
    bound = f"{settings.max_staleness} version(s)"
    if not report.steps:
        return Answer(question, "No batch is taken yet.", "plain")
    ages = together(report.steps).groups
    mean = number(mean_age(ages) or 0.0)
    measured = f"their staleness was {mean} versions on average and {max(ages, default=0)} at most"
    if report.violations:
        first = report.violations[0]
        return Answer(
            question,
            f"YES: the guarantee is violated ({len(report.violations)} row(s)); the first: {first.what}.",
            "bad",
        )
    if report.late:
        return Answer(
            question,
            f"{report.late:,} groups were trained past the bound of {bound}, which on_stale: train allows; {measured}.",
            "bad",
        )
    return Answer(question, f"No: all {report.groups:,} groups kept the bound of {bound}; {measured}.", "good")


def failed(phase: str, reason: str, by_kind: Mapping[str, int], first: str) -> Answer:
    """What went wrong: ``phase`` and ``reason`` of the run, faults by kind, and the ``first`` of them."""
    question = "What failed?"
    ended = f"The run {phase}: {reason}. " if phase in ("failed", "died") and reason else ""
    if phase == "died" and not reason:
        ended = "The run's process died. "
    if not by_kind:
        return Answer(
            question, f"{ended}{'' if ended else 'Nothing. '}No part had a fault.", "bad" if ended else "good"
        )
    counts = ", ".join(f"{count} × {kind}" for kind, count in by_kind.items())
    survived = "" if ended else " The run continued after each."
    return Answer(question, f"{ended}Faults: {counts}; the first: {first}.{survived}", "bad" if ended else "plain")


Z = 1.96
"""Standard errors on each side of an interval of 95 %."""
SURE = 2.0
"""Standard errors of the difference by which two means differ when it is not noise."""

Direction = Literal["rose", "fell", "did not change beyond its noise"]
Verdict = tuple[str, Tone]
"""An answer, and whether it is good news."""


def wilson(accuracy: float, prompts: int) -> tuple[float, float]:
    """The interval of an accuracy that was measured on so many prompts."""
    n = max(1, prompts)
    middle = (accuracy + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(accuracy * (1 - accuracy) / n + Z**2 / (4 * n**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def change(before: Evaluation, after: Evaluation) -> Direction:
    """Whether the accuracy of two evaluations differs beyond their noise."""
    low, high = wilson(before.accuracy, before.prompts), wilson(after.accuracy, after.prompts)
    difference = after.accuracy - before.accuracy
    if difference > math.hypot(after.accuracy - high[0], low[1] - before.accuracy):
        return "rose"
    if -difference > math.hypot(before.accuracy - low[0], high[1] - after.accuracy):
        return "fell"
    return "did not change beyond its noise"


@dataclass(frozen=True, slots=True)
class Trend:
    """The means of the first and the last tenth of some values, and whether they differ beyond the values' noise."""

    first: float
    last: float
    direction: Direction


def trend(values: Sequence[float]) -> Trend | None:
    """How a sequence went, of which the noise is independent from one value to the next; None without two values."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return None
    size = max(1, len(known) // 10)
    begin, end = known[:size], known[-size:]
    first, last = math.fsum(begin) / size, math.fsum(end) / size
    # The noise is that between neighbours, so that a trend itself does not count as noise.
    steps = [(later - earlier) ** 2 for earlier, later in pairwise(known)]
    error = math.sqrt(math.fsum(steps) / (2 * len(steps)) * 2 / size)
    if abs(last - first) <= SURE * error:
        return Trend(first, last, "did not change beyond its noise")
    return Trend(first, last, "rose" if last > first else "fell")


def learned(rewards: Sequence[float], evaluations: Sequence[Evaluation], spec: Mapping[str, Any]) -> Verdict:
    """Whether the run learned, in sentences. ``rewards`` are the mean training rewards by step."""
    series = leading_series(evaluations)
    if len(series) > 1:
        verdict, tone = _held_out(series)
        return f"{verdict} {_seen(rewards, spec)}".strip(), tone
    return _by_reward(rewards, spec, series)


def leading_series(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """The evaluations that the answer rests on, by step: the greedy ones, or else the kind with the most."""
    ordered = sorted(evaluations, key=attrgetter("kind", "after_step"))
    kinds = {kind: list(some) for kind, some in groupby(ordered, attrgetter("kind"))}
    several = [some for kind, some in kinds.items() if len(some) > 1]
    return kinds["greedy"] if len(kinds.get("greedy", ())) > 1 else max(several, key=len, default=[])


def _held_out(series: Sequence[Evaluation]) -> Verdict:
    first, last = series[0], series[-1]
    best = max(series, key=lambda one: one.accuracy)
    what = f"held-out accuracy ({first.kind})"
    went = f"from {with_interval(first)} at step {first.after_step} to {with_interval(last)} at step {last.after_step}."
    match change(first, last):
        case "rose":
            if change(best, last) == "fell":
                peak = f"At step {best.after_step} it was {with_interval(best)}."
                return f"Yes, but not to the end: {what} rose {went} {peak}", "plain"
            return f"Yes: {what} rose {went}", "good"
        case "fell":
            return f"No: {what} fell {went}", "bad"
    return f"Inconclusive: {what} did not change beyond its noise, {went}", "plain"


def with_interval(evaluation: Evaluation) -> str:
    """An accuracy with its interval and the number of prompts."""
    low, high = wilson(evaluation.accuracy, evaluation.prompts)
    return f"{evaluation.accuracy:.3f} ({low:.3f} to {high:.3f}, {evaluation.prompts:,} prompts)"


def _seen(rewards: Sequence[float], spec: Mapping[str, Any]) -> str:
    found = trend(rewards)
    if found is None:
        return ""
    caveat = " (not comparable over the steps)" if not_comparable(spec) else ""
    return f"Mean training reward{caveat}: {found.first:.3f} to {found.last:.3f}, first and last tenth of the steps."


def _by_reward(rewards: Sequence[float], spec: Mapping[str, Any], series: Sequence[Evaluation]) -> Verdict:
    found = trend(rewards)
    known = [reward for reward in rewards if math.isfinite(reward)]
    if found is None:
        return "Inconclusive: too few steps are trained.", "plain"
    if len(known) < FEW_STEPS:
        seen = ", ".join(f"{reward:.3f}" for reward in known)
        return f"Inconclusive: only {len(known)} steps are trained. Mean training reward by step: {seen}.", "plain"
    went = f"{found.first:.3f} to {found.last:.3f} (first and last tenth of the steps)"
    basis = "There are no two held-out evaluations to compare, so this is based on the training reward."
    if reasons := not_comparable(spec):
        return (
            f"Inconclusive: the mean training reward went from {went}, but its steps are not comparable: "
            f"{'; '.join(reasons)}. Held-out evaluations would answer it.",
            "plain",
        )
    if found.direction == "rose":
        return f"Yes: the mean training reward rose from {went}. {basis}", "good"
    if found.direction == "fell":
        return f"No: the mean training reward fell from {went}. {basis}", "bad"
    return f"Inconclusive: the mean training reward did not change beyond its noise, from {went}. {basis}", "plain"


def not_comparable(spec: Mapping[str, Any]) -> list[str]:
    """Why training rewards of different steps are of different prompts."""
    reasons = {
        "data.curriculum changes the prompts": value_at(spec, "data.curriculum"),
        "data.filter leaves out solved prompts": value_at(spec, "data.filter"),
        "algorithm.uniform_groups: reject leaves out groups that are all correct or all wrong": value_at(
            spec, "algorithm.uniform_groups"
        )
        == "reject",
    }
    return [reason for reason, holds in reasons.items() if holds]
