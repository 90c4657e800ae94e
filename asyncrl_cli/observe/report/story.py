"""What a report says first, in sentences: did it learn, what held it back, was it ever too stale, what failed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from asyncrl_cli.buffer.staleness import Report, together
from asyncrl_cli.observe.pages import number
from asyncrl_cli.observe.report.bottleneck import Bottleneck

SURE = 2.0
"""Standard errors of the difference by which two means differ when it is no noise."""

Tone = Literal["good", "bad", "plain"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A question and its answer; ``tone`` says how it bodes."""

    question: str
    answer: str
    tone: Tone


@dataclass(frozen=True, slots=True)
class Trend:
    """The means of the first and the last tenth of some values, and whether they differ beyond the values' noise."""

    first: float
    last: float
    direction: Literal["rose", "fell", "did not change beyond its noise"]


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


def learned(rewards: Sequence[float], accuracies: Mapping[str, Sequence[float]]) -> Answer:
    """Whether the reward rose. ``rewards`` by step; ``accuracies`` by kind of evaluation, in the order of steps."""
    question = "Did it learn?"
    found = trend(rewards)
    if found is None:
        return Answer(question, "Too few steps are trained to say.", "plain")
    said = {"rose": "Yes: the mean reward rose", "fell": "No: the mean reward fell"}.get(
        found.direction, "Not that one could tell: the mean reward did not change beyond its noise,"
    )
    text = f"{said} from {number(found.first)} to {number(found.last)} (first and last tenth of the steps)."
    changes = [
        f"{kind} {number(values[0])} to {number(values[-1])}" for kind, values in accuracies.items() if len(values) > 1
    ]
    if changes:
        text += f" Held-out accuracy: {', '.join(changes)}."
    return Answer(question, text, {"rose": "good", "fell": "bad"}.get(found.direction, "plain"))  # type: ignore[arg-type]


def held_back(found: Bottleneck | None) -> Answer:
    """What bounded the speed, and what to change."""
    question = "What held it back?"
    if found is None:
        return Answer(question, "No step is trained yet.", "plain")
    return Answer(question, f"{found.sentence} {found.advice}", "plain")


def stale(report: Report) -> Answer:
    """Whether the bound on staleness held."""
    question = "Was it ever too stale?"
    settings = report.standing.settings
    bound = f"{settings.max_staleness} version(s)"
    if not report.steps:
        return Answer(question, "No batch is taken yet.", "plain")
    lags = together(report.steps).groups
    mean = sum(lag * count for lag, count in lags.items()) / lags.total() if lags else 0.0
    lagged = f"groups lagged {number(mean)} versions behind on average and {max(lags, default=0)} at most"
    if report.breaches:
        first = report.breaches[0]
        return Answer(
            question, f"YES: the guarantee is broken ({len(report.breaches)} row(s)); the first: {first.what}.", "bad"
        )
    if report.late:
        return Answer(
            question,
            f"{report.late:,} groups were trained past the bound of {bound}, as on_stale: train allows; {lagged}.",
            "bad",
        )
    return Answer(question, f"No: all {report.groups:,} groups kept the bound of {bound}; {lagged}.", "good")


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
    survived = "" if ended else " The run went on after each."
    return Answer(question, f"{ended}Faults: {counts}; the first: {first}.{survived}", "bad" if ended else "plain")
