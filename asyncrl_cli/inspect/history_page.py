"""The history of a run: the page of `asyncrl inspect run`, and the lines of `asyncrl events`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from asyncrl_cli.core.terminal import counted
from asyncrl_cli.inspect.health import HealthFinding
from asyncrl_cli.inspect.pages import Page, duration, moment, number, paragraph, record_table
from asyncrl_cli.journal.events import Event, events
from asyncrl_cli.journal.history import History
from asyncrl_cli.journal.queries import snapshot
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.runs.directory import ACTIVE, RunDirectory, engines_text

LABEL = 9
"""Width of a line's label in columns."""


def history_page(run: RunDirectory, history: History | None, findings: Sequence[HealthFinding] = ()) -> Page:
    """Show a run's history and its health. Without a history (there is no journal yet), show only start and state."""
    state, manifest = run.state, run.manifest
    document: dict[str, Any] = {
        "run": run.run_id,
        "phase": run.status,
        "folder": str(run.path.absolute()),
        "state": asdict(state) | {"phase": run.status},
        "manifest": manifest,
        "history": asdict(history) if history else None,
        "findings": [asdict(finding) for finding in findings],
    }
    # The version that engines serve, as on every page. ``state`` has the trainer's version, which may not be published.
    version = state.version if history is None else history.progress.version
    lines = [f"run      {run.run_id}, {run.status}, step {state.step} of {state.steps}, weight version {version}"]
    if state.reason:
        lines.append(f"reason   {state.reason}")
    if state.engines and run.status in ACTIVE:
        lines.append(f"engines  {engines_text(state)}")
    if command := manifest.get("command"):
        lines.append(f"started  {manifest.get('started', '?')} on {manifest.get('host', '?')}")
        lines.append(f"command  {shlex.join([Path(command[0]).name, *command[1:]])}")
    lines.append(f"code     asyncrl {manifest.get('asyncrl', '?')}, Python {manifest.get('python', '?')}")
    lines.append(f"folder   {run.path}")
    if history is not None:
        blocks = (
            _health(findings, history.work.steps),
            record_table("starts", history.starts),
            _failures(history),
            _work(history),
            record_table("evaluations", history.evaluations, omit=("oldest", "newest")),
        )
        lines += [line for block in blocks if block for line in ("", *block)]
    return Page(document, lines)


def _health(findings: Sequence[HealthFinding], steps: int) -> list[str]:
    """The findings that last, and then those that have ended."""
    ordered = sorted(findings, key=lambda finding: finding.last_step is not None)
    texts = [finding.summary for finding in ordered] or [f"no rule was broken in {counted(steps, 'step')}"]
    lines = [line for text in texts for line in paragraph(text, " " * LABEL)]
    return [f"{'health':{LABEL}}{lines[0][LABEL:]}", *lines[1:]] if steps else []


def _failures(history: History) -> list[str]:
    total = sum(history.failures_by_kind.values())
    if not total:
        return []
    lines = [f"failures: {', '.join(f'{count} {kind}' for kind, count in history.failures_by_kind.items())}"]
    for failure in history.failures:
        lines += paragraph(f"{moment(failure.at)}  {failure.part}: {failure.message.strip()}", "  ")
    if total > len(history.failures):
        lines.append(f"  (the newest {len(history.failures)} of {total})")
    return lines


def _work(history: History) -> list[str]:
    work = history.work
    if not work.seconds:
        return ["no step is trained yet"]
    shares = ", ".join(f"{name.partition('/')[2].replace('_', ' ')} {share:.0%}" for name, share in work.shares.items())
    return [
        f"trained  {counted(work.steps, 'step')} in {duration(work.seconds)}, "
        f"{number(work.seconds / work.steps)} s per step",
        f"tokens   trained {work.trained_tokens:,} ({work.trained_tokens / work.seconds:,.0f}/s), "
        f"generated {work.generated_tokens:,} ({work.generated_tokens / work.seconds:,.0f}/s)",
        f"time     {shares}",
    ]


def as_json(event: Event) -> str:
    """Return ``event`` (its kind), ``at`` (Unix time in seconds) and its fields as JSON."""
    return json.dumps({"event": event.name, "at": event.at, **event.facts})


def as_line(event: Event) -> str:
    """Return a line with local time, kind, and the fields that are not empty."""
    facts = {name: value for name, value in event.facts.items() if name != "metrics" and value not in (None, "")}
    if "begun_at" in facts:
        facts["seconds"] = event.at - facts.pop("begun_at")
    for name in ("reward/mean", "train/loss"):
        if name in (metrics := event.facts.get("metrics", {})):
            facts[name] = metrics[name]
    texts = [
        f"{name} {number(value) if isinstance(value, float) else ' '.join(str(value).split())}"
        for name, value in facts.items()
    ]
    local_time = f"{datetime.fromtimestamp(event.at):%Y-%m-%d %H:%M:%S.%f}"[:-3]
    return f"{local_time}  {event.name:10}  {', '.join(texts)}"


def run_events(run: RunDirectory, kinds: Collection[str]) -> list[Event]:
    """Return a run's events by time. Raises ``JournalError`` if there is no journal."""
    with snapshot(run.path / FILE) as connection:
        # Read all before the first line is printed: SQLite cannot empty its `-wal` file while a pager that waits for
        # its user keeps a snapshot open.
        return list(events(connection, kinds))
