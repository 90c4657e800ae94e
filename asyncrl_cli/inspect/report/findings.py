"""What a report says first, in sentences: what held the run back, was it ever too stale, what failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from asyncrl_cli.inspect.pages import number
from asyncrl_cli.inspect.report.bottleneck import Bottleneck
from asyncrl_cli.journal.staleness import Report, together

Tone = Literal["good", "bad", "plain"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A question and its answer, what stands behind it, and what to do; ``tone`` says how it bodes."""

    question: str
    answer: str
    tone: Tone
    more: tuple[str, ...] = ()


def held_back(found: Bottleneck | None) -> Answer:
    """What bounded the speed, and what to change."""
    question = "What held it back?"
    if found is None:
        return Answer(question, "No step is trained yet.", "plain")
    return Answer(question, found.sentence, "plain", (found.breakdown, found.advice))


def stale(report: Report) -> Answer:
    """Whether the bound on staleness held."""
    question = "Was it ever too stale?"
    settings = report.progress.settings
    bound = f"{settings.max_staleness} version(s)"
    if not report.steps:
        return Answer(question, "No batch is taken yet.", "plain")
    lags = together(report.steps).groups
    mean = sum(lag * count for lag, count in lags.items()) / lags.total() if lags else 0.0
    lagged = f"groups lagged {number(mean)} versions behind on average and {max(lags, default=0)} at most"
    if report.violations:
        first = report.violations[0]
        return Answer(
            question, f"YES: the guarantee is broken ({len(report.violations)} row(s)); the first: {first.what}.", "bad"
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
