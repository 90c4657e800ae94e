"""A report's first answers: is the run healthy, did it learn, what limited its speed, was it ever too stale, and what
failed?

Learning: held-out accuracy decides if there is any, otherwise the training reward. Only evaluations with the same
number of prompts are compared, because these are the same prompts. Held-out accuracy is a share of prompts, so its
uncertainty follows from their number: Wilson's intervals, and Newcombe's for the difference of two evaluations (1998,
method 10), both at 95 %. The highest of several evaluations is partly high by chance, so the test of its difference
from the last evaluation divides the level by the number of evaluations (Bonferroni's correction). All evaluations use
the same prompts, so a real difference is easier to see than these intervals say: they err towards "inconclusive".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from statistics import NormalDist
from typing import Any, Literal

from asyncrl_cli.core.intervals import LEVEL, Z, wilson
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.inspect.health import HealthFinding
from asyncrl_cli.inspect.pages import number
from asyncrl_cli.inspect.report.evidence import FEW_STEPS
from asyncrl_cli.inspect.resolved import value_at
from asyncrl_cli.journal.events import Evaluation
from asyncrl_cli.journal.staleness import Report, mean_age, together
from asyncrl_cli.plan.prediction import Prediction, advice

Tone = Literal["good", "bad", "plain"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A question with its answer, the evidence, and the remedy. ``tone``: good or bad news."""

    question: str
    answer: str
    tone: Tone
    more: tuple[str, ...] = ()


HEALTH_LINES = 12
"""Largest number of findings on the card about health."""


def healthy(findings: Sequence[HealthFinding], steps: int, is_over: bool) -> Answer:
    """List the findings that last, then those that have ended. ``steps``: number of trained steps."""
    question = "Is it healthy?"
    tone: Tone = "plain"
    lasting = [finding for finding in findings if finding.last_step is None]
    if not steps:
        return Answer(question, _no_step(is_over), "plain")
    if not findings:
        return Answer(question, f"Yes: no rule was broken in {counted(steps, 'step')}.", "good")
    if lasting:
        worst, *other_findings = sorted(lasting, key=lambda finding: not finding.stops_learning)
        other_findings += [finding for finding in findings if finding not in lasting]
        answer, tone = f"No: {worst.text}.", "bad"
    else:
        other_findings = list(findings)
        answer = f"Yes, in the newest of {counted(steps, 'step')}; before, a rule was broken."
    details = [f"{finding.summary[:1].upper()}{finding.summary[1:]}." for finding in other_findings[:HEALTH_LINES]]
    if len(other_findings) > HEALTH_LINES:
        details.append(f"And {len(other_findings) - HEALTH_LINES} more (`asyncrl inspect run`).")
    return Answer(question, answer, tone, tuple(details))


def limited(found: Prediction | str, recorded: Sequence[str], ended: bool) -> Answer:
    """Say which part limited the speed, and how to make the run faster.

    Args:
        found: the prediction for the run, or the reason why there is none.
        recorded: sentences about the trainer's time; empty before the first step.
    """
    text, more = _no_step(ended), tuple(recorded)
    if recorded and isinstance(found, str):
        text = f"No advice: {found}."
    elif recorded and not isinstance(found, str):
        step, sync = found.outcome.step_s, found.sync.step_s
        simulated = f"A step takes {step:.3g} s in the simulation; without staleness {sync:.3g} s."
        text, *others = advice(found)
        more = (*others, simulated, *recorded)
    return Answer("What limited its speed?", answer=text, tone="plain", more=more)


def _no_step(ended: bool) -> str:
    return "The run ended before its first step." if ended else "No step is trained yet."


def stale(report: Report, ended: bool) -> Answer:
    """Say whether the bound on staleness held."""
    tone: Tone = "bad"
    bound = counted(report.progress.settings.max_staleness, "version")
    if not report.steps:
        text, tone = _no_step(ended), "plain"
    elif report.violations:
        rows, first = counted(len(report.violations), "row"), report.violations[0]
        text = f"YES: the guarantee is violated ({rows}); the first: {first.what}."
    else:
        ages = together(report.steps).groups
        mean = number(mean_age(ages))
        measured = f"their staleness was {mean} versions on average and {max(ages, default=0)} at most"
        if report.late:
            allowed = f"past the bound of {bound}, which on_stale: train allows"
            text = f"{report.late:,} groups were trained {allowed}; {measured}."
        else:
            text, tone = f"No: all {report.groups:,} groups kept the bound of {bound}; {measured}.", "good"
    return Answer("Was it ever too stale?", text, tone)


def failed(
    phase: str, reason: str, fault_counts: Mapping[str, int], first_fault: str, is_healthy: bool = True
) -> Answer:
    """Name the failures: ``phase`` and ``reason`` of the run, ``fault_counts`` by kind, and the first fault."""
    question = "What failed?"
    ended = f"The run {phase}: {reason}. " if phase in ("failed", "died") and reason else ""
    if phase == "died" and not reason:
        ended = "The run's process died. "
    if not fault_counts and not ended and not is_healthy:
        return Answer(question, "No part had a fault, but the training is not healthy (see above).", "plain")
    if not fault_counts:
        return Answer(question, ended.strip() or "Nothing: no part had a fault.", "bad" if ended else "good")
    counts = ", ".join(f"{count} × {kind}" for kind, count in fault_counts.items())
    survived = "" if ended else " The run continued after each."
    return Answer(
        question, f"{ended}Faults: {counts}; the first: {first_fault}.{survived}", "bad" if ended else "plain"
    )


SURE = 2.0
"""Two means differ beyond noise if they differ by more than this many standard errors."""

Direction = Literal["rose", "fell", "did not change beyond its noise"]


def change(before: Evaluation, after: Evaluation, z: float = Z) -> Direction:
    """Compare the accuracies of two evaluations, and ignore differences within their noise."""
    low, high = wilson(before.accuracy, before.prompts, z), wilson(after.accuracy, after.prompts, z)
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
    """Return the trend of values with independent noise, or None for fewer than two values."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return None
    size = max(1, len(known) // 10)
    begin, end = known[:size], known[-size:]
    first, last = math.fsum(begin) / size, math.fsum(end) / size
    # Noise is measured between neighbours, because the trend itself must not count as noise.
    steps = [(later - earlier) ** 2 for earlier, later in pairwise(known)]
    error = math.sqrt(math.fsum(steps) / (2 * len(steps)) * 2 / size)
    if abs(last - first) <= SURE * error:
        return Trend(first, last, "did not change beyond its noise")
    return Trend(first, last, "rose" if last > first else "fell")


def learned(
    rewards: Sequence[float],
    evaluations: Sequence[Evaluation],
    spec: Mapping[str, Any],
    ended: bool = False,
    findings: Sequence[HealthFinding] = (),
) -> Answer:
    """Say whether the run learned. ``rewards``: the mean training reward of each step. ``findings`` of its health that
    last take precedence over an inconclusive comparison."""
    series = leading_series(evaluations)
    tone: Tone = "plain"
    if not rewards and ended:
        verdict = _no_step(ended)
    elif any(len(some) > 1 for some in same_prompts(series)):
        verdict, tone = _held_out(series)
        verdict = f"{verdict} {_seen(rewards, spec)}".strip()
    else:
        verdict, tone = _by_reward(rewards, spec)
    broken = next((finding for finding in findings if finding.stops_learning and finding.last_step is None), None)
    if broken is not None and rewards and tone != "bad":
        since = f"{broken.observation}, since step {broken.first_step}."
        if tone == "good" or verdict.startswith("Yes"):
            verdict, tone = f"{verdict} But {since}", "plain"
        else:
            comparison = verdict.removeprefix("Inconclusive: ")
            verdict, tone = f"No: {since} {comparison[:1].upper()}{comparison[1:]}", "bad"
    return Answer("Did it learn?", verdict, tone)


def same_prompts(series: Sequence[Evaluation]) -> list[list[Evaluation]]:
    """Group evaluations on the same prompts. The group with the most prompts comes first."""
    by_prompts: dict[int, list[Evaluation]] = {}
    for one in series:
        by_prompts.setdefault(one.prompts, []).append(one)
    return [by_prompts[prompts] for prompts in sorted(by_prompts, reverse=True)]


def leading_series(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the evaluations on which the answer rests, by step: greedy, or otherwise the most frequent kind."""
    ordered = sorted(evaluations, key=attrgetter("kind", "after_step"))
    kinds = {kind: list(some) for kind, some in groupby(ordered, attrgetter("kind"))}
    several = [some for kind, some in kinds.items() if len(some) > 1]
    return kinds["greedy"] if len(kinds.get("greedy", ())) > 1 else max(several, key=len, default=[])


def _held_out(series: Sequence[Evaluation]) -> tuple[str, Tone]:
    several = [some for some in same_prompts(series) if len(some) > 1]
    # Compare the evaluations that span most of the run; the ones with the most prompts if there are several such sets.
    compared = max(several, key=lambda some: some[-1].after_step - some[0].after_step)
    first, last = compared[0], compared[-1]
    measure = f"held-out accuracy ({first.kind})"
    went = f"from {with_interval(first)} at step {first.after_step} to {with_interval(last)} at step {last.after_step}."
    match change(first, last):
        case "rose":
            if peak := next(filter(None, map(_fell_again, several)), None):
                return f"Yes, but not to the end: {measure} rose {went} {peak}", "plain"
            return f"Yes: {measure} rose {went}", "good"
        case "fell":
            return f"No: {measure} fell {went}", "bad"
    return f"Inconclusive: {measure} did not change beyond its noise, {went}", "plain"


def _fell_again(same: Sequence[Evaluation]) -> str:
    """Say that the last evaluation is worse than the best by more than noise; empty if it is not."""
    *earlier, last = same
    best = max(earlier, key=lambda one: one.accuracy)
    if change(best, last, NormalDist().inv_cdf(1 - LEVEL / 2 / len(earlier))) != "fell":
        return ""
    now = f", and {with_interval(last)} at step {last.after_step}"
    return f"At step {best.after_step} it was {with_interval(best)}{now}."


def with_interval(evaluation: Evaluation) -> str:
    """Format an accuracy with its interval and the number of prompts."""
    low, high = wilson(evaluation.accuracy, evaluation.prompts)
    return f"{evaluation.accuracy:.3f} ({low:.3f} to {high:.3f}, {evaluation.prompts:,} prompts)"


def _seen(rewards: Sequence[float], spec: Mapping[str, Any]) -> str:
    found = trend(rewards)
    if found is None:
        return ""
    caveat = " (not comparable over the steps)" if not_comparable(spec) else ""
    return f"Mean training reward{caveat}: {found.first:.3f} to {found.last:.3f}, first and last tenth of the steps."


def _by_reward(rewards: Sequence[float], spec: Mapping[str, Any]) -> tuple[str, Tone]:
    found = trend(rewards)
    if found is None:
        return "Inconclusive: too few steps are trained.", "plain"
    known = [f"{reward:.3f}" for reward in rewards if math.isfinite(reward)]
    if len(known) < FEW_STEPS:
        seen = f"only {counted(len(known), 'step')} trained. Mean training reward by step: {', '.join(known)}."
        return f"Inconclusive: {seen}", "plain"
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
    """Return the reasons why different steps use different kinds of prompts, so their rewards cannot be compared."""
    rejects = value_at(spec, "algorithm.uniform_groups") == "reject"
    reasons = {
        "data.curriculum changes the prompts": value_at(spec, "data.curriculum"),
        "data.filter leaves out solved prompts": value_at(spec, "data.filter"),
        "algorithm.uniform_groups: reject leaves out groups that are all correct or all wrong": rejects,
    }
    return [reason for reason, holds in reasons.items() if holds]
