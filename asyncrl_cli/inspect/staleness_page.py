"""The page of `asyncrl staleness`: staleness of groups and of tokens, the proof of the bound, the what-if estimate.

Steps are counted from 1 here, as in metrics.jsonl; the journal counts from 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from asyncrl_cli.core.terminal import counted
from asyncrl_cli.inspect.pages import Page, paragraph, table
from asyncrl_cli.inspect.plan_page import outcome_document
from asyncrl_cli.inspect.what_if import Reproduced
from asyncrl_cli.journal.staleness import MOST_VIOLATIONS, Report, StepStaleness, in_ranges, mean_age, together
from asyncrl_cli.plan.prediction import bound_text, less, limit_text
from asyncrl_cli.runs.directory import RunDirectory

ROWS = 20
"""Largest number of ranges of steps, so a long run fits on a screen."""
COLUMNS = 4
"""Largest number of ranges of staleness, for the same reason."""
VIOLATIONS_SHOWN = 20
ASSUMPTIONS = (
    "This is an estimate: the ledger decides again, with the lengths of the last {steps} steps that have",
    "no evaluation and no checkpoint in them, and with the speed of engines and trainer in them",
    "(`asyncrl plan` prints it). The simulated row of bound {bound} should agree with the recorded row.",
)


def staleness_page(run: RunDirectory, report: Report) -> Page:
    """Show staleness by ranges of steps, and the proof of the bound. The document has every step."""
    where = report.progress
    settings = where.settings
    lines = [
        f"run      {run.run_id}, {run.status}, {counted(len(report.steps), 'batch')} taken"
        + (f" from step {where.first_step + 1} on" if where.first_step else ""),
        f"bound    at most {counted(settings.max_staleness, 'version')} (on_stale: {settings.on_stale}), "
        f"a version every {counted(settings.publish_every, 'step')}",
    ]
    document: dict[str, Any] = {
        "run": run.run_id,
        "phase": run.status,
        "settings": asdict(settings),
        "held": not report.violations,
        "late": report.late,
        "groups": report.groups,
        "tokens": report.tokens,
        "violations": [
            asdict(violation) | {"step": None if violation.step is None else violation.step + 1}
            for violation in report.violations
        ],
        "steps": [_staleness_document(step) for step in report.steps],
    }
    if report.steps:
        whole = together(report.steps)
        document["all"] = _staleness_document(whole)
        lines += ["", *_table(in_ranges(report.steps, ROWS), whole)]
    return Page(document, [*lines, "", *_verdict(report)])


def _table(shown: Sequence[StepStaleness], whole: StepStaleness) -> list[str]:
    highest = max(whole.groups, default=0)
    size = -(-(highest + 1) // COLUMNS)
    # A staleness below 0 is a violation; the proof shows it.
    ranges = [(low, min(low + size - 1, highest)) for low in range(0, highest + 1, size)]
    columns = [*(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges), "mean", "max"]

    def row(name: str, step: StepStaleness) -> tuple[str, ...]:
        crossed = f"{step.crossed / step.rollouts:.0%}" if step.rollouts else "-"
        return name, *_cells(step.groups, ranges), *_cells(step.tokens, ranges), crossed

    rows = [
        row(f"{step.first + 1}" if step.first == step.last else f"{step.first + 1}-{step.last + 1}", step)
        for step in shown
    ]
    if len(shown) > 1:
        rows.append(row("all", whole))
    lines = table(("step", *columns, *columns, "crossed"), rows)
    # The two halves have the same columns, so a line above them names groups and tokens.
    middle = lines[0].index("max") + len("max")
    above = "groups".rjust(middle) + "tokens".rjust(lines[0].rindex("max") + len("max") - middle)
    return ["shares of groups and of tokens by their staleness in versions", f"{above}  rollouts", *lines]


def _cells(counts: Counter[int], ranges: Sequence[tuple[int, int]]) -> Iterator[str]:
    total = counts.total()
    if not total:
        yield from ["-"] * (len(ranges) + 2)
        return
    for low, high in ranges:
        share = sum(count for age, count in counts.items() if low <= age <= high) / total
        yield f"{share:.0%}" if share == 0 or share >= 0.005 else "<1%"
    yield f"{mean_age(counts):.2f}"
    yield str(max(counts))


def _verdict(report: Report) -> Iterator[str]:
    bound = report.progress.settings.max_staleness
    if any(step.dropped for step in report.steps):
        yield "tokens of some steps were dropped (journal.keep): they are not in the columns of tokens"
    if report.late:
        yield f"late     {counted(report.late, 'group')} trained past the bound, which on_stale: train allows"
    if not report.violations:
        late = "except for the late groups, " if report.late else ""
        yield f"proof    {late}the bound held: {report.groups:,} groups have a staleness of 0 to {bound} versions,"
        yield f"         and none of {report.tokens:,} tokens is older than its group"
        return
    more = " or more" if len(report.violations) == MOST_VIOLATIONS else ""
    yield f"VIOLATED the guarantee does not hold: {counted(f'{len(report.violations)}{more}', 'row')} violate it"
    for violation in report.violations[:VIOLATIONS_SHOWN]:
        step = "" if violation.step is None else f"step {violation.step + 1}, "
        group = "" if violation.group_id is None else f"group {violation.group_id}: "
        yield f"  {step}{group}{violation.what}"
    if len(report.violations) > VIOLATIONS_SHOWN:
        yield f"  (the first {VIOLATIONS_SHOWN}; --json has more)"


def with_what_if(page: Page, found: Reproduced, max_staleness: int, reason: str = "") -> Page:
    """Add an estimate for another bound, and the limit of the run's speed. ``reason``: why there is no advice."""
    observed, bound = found.measured.observed, found.measured.settings.max_staleness
    predicted = found.prediction() if found.misfit is None else None
    outcomes = {bound: found.outcome, max_staleness: found.under(max_staleness)}
    waited = observed.trainer["waiting"] / sum(observed.trainer.values())

    def row(name: str, at: int, step_s: float, waits: float, mean: float, highest: int) -> tuple[str, ...]:
        return name, str(at), f"{step_s:,.3g} s", f"{waits:.0%}", f"{mean:.2f}", str(highest)

    rows = [row("recorded", bound, observed.step_s, waited, mean_age(observed.staleness), max(observed.staleness))]
    for at, outcome in outcomes.items():
        waits = outcome.share("groups", "missing")
        rows.append(row("simulated", at, outcome.step_s, waits, mean_age(outcome.staleness), max(outcome.staleness)))
    header = ("what if", "bound", "step", "trainer waits", "mean staleness", "max")
    ratio = outcomes[max_staleness].step_s / found.outcome.step_s
    if predicted is not None:
        claims = [f"With bound {max_staleness}, steps would take {less(1 - ratio)} time than with bound {bound}."]
        claims += [] if reason else [bound_text(predicted), limit_text(predicted)]
    else:
        claims = [
            "The simulation does not reproduce the recorded steps within 10 %, so this says nothing about the run. The "
            f"worst fit: {found.misfit}."
        ]
    claims += [f"No advice: {reason}."] if reason else []
    assumptions = [line.format(steps=observed.steps, bound=bound) for line in ASSUMPTIONS]
    document = page.document | {
        "what_if": {
            "estimate": True,
            "assumptions": assumptions,
            "steps": observed.steps,
            "recorded": {
                "max_staleness": bound,
                "step_s": observed.step_s,
                "waited_share": waited,
                "mean_staleness": mean_age(observed.staleness),
            },
            "simulated": [{"max_staleness": at} | outcome_document(outcome) for at, outcome in outcomes.items()],
            "reproduced": found.misfit is None,
            "misfit": found.misfit,
            "time_relative_to_own_bound": ratio,
            "least_free_max_staleness": predicted.free if predicted else None,
            "limit": predicted.limit if predicted and not reason else None,
            "no_advice": reason,
        }
    }
    lines = [*page.lines, "", *table(header, rows), *chain.from_iterable(map(paragraph, claims)), *assumptions]
    return Page(document, lines)


def _staleness_document(step: StepStaleness) -> dict[str, Any]:
    return {
        "first_step": step.first + 1,
        "last_step": step.last + 1,
        "groups_by_staleness": dict(sorted(step.groups.items())),
        "tokens_by_staleness": dict(sorted(step.tokens.items())),
        "groups_mean_staleness": mean_age(step.groups) if step.groups else None,
        "tokens_mean_staleness": mean_age(step.tokens) if step.tokens else None,
        "rollouts": step.rollouts,
        "rollouts_crossed": step.crossed,
        "tokens_dropped": step.dropped,
    }
