"""The page of `asyncrl staleness`: the staleness of groups and of tokens, and the proof of the bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

from asyncrl_cli.core.terminal import counted
from asyncrl_cli.inspect.pages import Page, table
from asyncrl_cli.journal.staleness import MOST_VIOLATIONS, Report, StepStaleness, in_ranges, mean_age, together
from asyncrl_cli.runs.directory import RunDirectory

ROWS = 20
"""Largest number of ranges of steps, so a long run fits on a screen."""
VIOLATIONS_SHOWN = 20


def staleness_page(run: RunDirectory, report: Report) -> Page:
    """Show staleness by ranges of steps, and the proof of the bound. The document has every step."""
    settings = report.progress.settings
    document: dict[str, Any] = {
        "run": run.run_id,
        "phase": run.status,
        "settings": asdict(settings),
        "held": not report.violations,
        "late": report.late,
        "groups": report.groups,
        "tokens": report.tokens,
        "violations": [asdict(violation) for violation in report.violations],
        "steps": [_document(step) for step in report.steps],
        "all": None,
    }
    lines = [
        f"run      {run.run_id}, {run.status}, {report.progress.step} batches taken",
        f"bound    at most {counted(settings.max_staleness, 'version')} (on_stale: {settings.on_stale}), "
        f"a version every {counted(settings.publish_every, 'step')}",
    ]
    if report.steps:
        entire_run = together(report.steps)
        document["all"] = _document(entire_run)
        rows = [_row(step) for step in in_ranges(report.steps, ROWS)]
        header = ("steps", "groups: mean", "max", "tokens: mean", "max", "rollouts crossed")
        lines += ["", "staleness in versions", *table(header, [*rows, _row(entire_run, "all")])]
    return Page(document, [*lines, "", *_verdict(report)])


def _row(step: StepStaleness, name: str = "") -> tuple[str, ...]:
    steps = f"{step.first_step}" if step.first_step == step.last_step else f"{step.first_step}-{step.last_step}"
    ages = [
        cell
        for counts in (step.groups, step.tokens)
        for cell in ((f"{mean_age(counts):.2f}", str(max(counts))) if counts else ("-", "-"))
    ]
    return name or steps, *ages, f"{step.crossed / step.rollouts:.0%}" if step.rollouts else "-"


def _verdict(report: Report) -> Iterator[str]:
    bound = report.progress.settings.max_staleness
    if any(step.dropped for step in report.steps):
        yield "tokens of some steps were dropped (journal.keep): they are not in the columns of tokens"
    if report.late:
        yield f"late     {counted(report.late, 'group')} trained past the bound, which on_stale: train allows"
    if not report.violations:
        exception = "except for the late groups, " if report.late else ""
        yield f"proof    {exception}the bound held: {report.groups:,} groups have a staleness of 0 to {bound} versions,"
        yield f"         and none of {report.tokens:,} tokens is older than its group"
        return
    or_more = " or more" if len(report.violations) == MOST_VIOLATIONS else ""
    yield f"VIOLATED the guarantee does not hold: {counted(f'{len(report.violations)}{or_more}', 'row')} violate it"
    for violation in report.violations[:VIOLATIONS_SHOWN]:
        step = "" if violation.step is None else f"step {violation.step}, "
        group = "" if violation.group_id is None else f"group {violation.group_id}: "
        yield f"  {step}{group}{violation.what}"
    if len(report.violations) > VIOLATIONS_SHOWN:
        yield f"  (the first {VIOLATIONS_SHOWN}; --json has more)"


def _document(step: StepStaleness) -> dict[str, Any]:
    values = {field.name: getattr(step, field.name) for field in fields(step)}
    return {
        name: dict(sorted(value.items())) if isinstance(value, Counter) else value for name, value in values.items()
    }
