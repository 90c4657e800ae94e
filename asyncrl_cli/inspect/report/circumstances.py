"""What the advice on a run depends on, read from its journal and spec."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl_cli.inspect.report.bottleneck import Circumstances, Estimate
from asyncrl_cli.inspect.what_if import ENGINES, Workload, newest, simulate, times_relative, workload
from asyncrl_cli.journal.progress import dropped_groups
from asyncrl_cli.journal.step_timeline import StepSpan, recording
from asyncrl_cli.records.groups import BufferSettings

FURTHER = (1, 2, 4)
"""Bounds that are tried, above the run's own."""
SIMULATED_GROUPS = 5000
"""Groups that are simulated, the newest ones: a report is made within seconds for a run of any length."""
TOLERANCE = 0.15
"""There is no estimate when the recorded time is further than this outside the times simulated for the own bound."""


def circumstances(
    connection: sqlite3.Connection, spec: Mapping[str, Any], spans: Sequence[StepSpan], settings: BufferSettings
) -> Circumstances | None:
    """None before a trained step."""
    if not spans:
        return None
    trained = len(spans) * settings.groups_per_step
    dropped = {state: sum(counts.values()) for state, counts in dropped_groups(connection).items()}
    try:
        work = workload(newest(recording(connection), SIMULATED_GROUPS))
    except ValueError:  # a damaged journal has batches without groups
        work = None
    return Circumstances(
        spec=spec,
        max_staleness=settings.max_staleness,
        episodic=any("response/calls_mean" in span.metrics for span in spans),
        steps=len(spans),
        most_rollouts=work.concurrency * work.settings.group_size if work else 0,
        rejected=dropped["rejected"] / trained,
        requeued=dropped["requeued"] / trained,
        estimates=_estimates(work) if work and _reproduced(work) else (),
    )


def _estimates(work: Workload) -> tuple[Estimate, ...]:
    bounds = [work.settings.max_staleness + further for further in FURTHER]
    return tuple(Estimate(bound, *both) for bound, both in times_relative(work, bounds).items())


def _reproduced(work: Workload) -> bool:
    own = [simulate(work, work.settings.max_staleness, engines).seconds for engines in ENGINES]
    return min(own) * (1 - TOLERANCE) <= work.seconds <= max(own) * (1 + TOLERANCE)
