"""Events as lines: for people, and for programs (one JSON object per line)."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator
from datetime import datetime

from asyncrl_cli.inspect.pages import number
from asyncrl_cli.journal.events import Event, Reader
from asyncrl_cli.journal.queries import spooled
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.runs.directory import ACTIVE, RunDirectory

LOOK_S = 0.5
"""Seconds between two looks at a run that is followed."""


def as_json(event: Event) -> str:
    """``event`` (its kind), ``at`` (unix time, s) and its fields."""
    return json.dumps({"event": event.name, "at": event.at, **event.facts()})


def as_line(event: Event) -> str:
    """Local time, kind, and the fields that have something to say."""
    facts = event.facts()
    metrics = facts.pop("metrics", {})
    if "begun_at" in facts:
        facts["seconds"] = event.at - facts.pop("begun_at")
    told = [f"{name} {_shown(value)}" for name, value in facts.items() if value not in (None, "")]
    told += [f"{name} {number(value)}" for name, value in metrics.items() if name in ("reward/mean", "train/loss")]
    at = f"{datetime.fromtimestamp(event.at):%Y-%m-%d %H:%M:%S.%f}"[:-3]
    return f"{at}  {event.name:10}  {', '.join(told)}"


def run_events(run: RunDirectory, kinds: Collection[str], follow: bool) -> Iterator[Event]:
    """A run's events by time; with ``follow`` those to come as well, until the run has ended.

    Raises ``JournalError`` where there is no journal.
    """
    reader = Reader(kinds)
    while True:
        going_on = follow and run.status in ACTIVE  # asked first: what it wrote before it ended is read, too
        yield from spooled(run.path / FILE, reader.read)
        if not going_on:
            return
        time.sleep(LOOK_S)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return number(value)
    return " ".join(str(value).split())
