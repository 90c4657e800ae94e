"""The staleness of the training, and the proof that the bound held, from the journal's rows for every token.

A group's staleness is its batch's version minus its own version at admission. A token's staleness counts from the
version that sampled it, as recorded in its segment. The proof compares the rows with each other and trusts no summary:

* the batch of step t is trained at version t // k (k steps per publish);
* every group in a batch has a staleness of 0 to S (with ``on_stale: train`` higher values count as late). The settings
  from when its step was taken decide, because a resume may change them;
* no token is older than its group's version, so no token's staleness exceeds its group's staleness;
* no token is newer than its batch.

Only sampled tokens count: tokens that the policy was given in an episode (``CONTEXT``) have no version. Groups of
episodes are admitted without the prompt's tokens. In any other group a ``CONTEXT`` token is older than its group, which
is a violation.

Steps count from 1 in the report, and from 0 in the rows.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl_cli.journal.progress import Progress, progress
from asyncrl_cli.records.generation import CONTEXT
from asyncrl_cli.records.groups import BufferSettings


@dataclass(slots=True)
class StepStaleness:
    """The staleness of one batch, or of several batches together. ``groups`` and ``tokens`` count by staleness.

    ``rollouts`` counts rollouts with tokens, ``crossed`` the rollouts with tokens from more than one version.
    ``dropped`` is True if the journal has dropped some of the tokens (``journal.keep``).
    """

    first_step: int
    last_step: int
    groups: Counter[int] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    rollouts: int = 0
    crossed: int = 0
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class Violation:
    """A row that breaks the guarantee, and ``what`` is wrong. ``step`` or ``group_id`` is None if it concerns none."""

    step: int | None
    group_id: int | None
    what: str


MOST_VIOLATIONS = 1000
"""Number of violations described individually; a journal with more is damaged everywhere."""


@dataclass(frozen=True, slots=True)
class Report:
    """All batches in a journal, and the proof's findings.

    Args:
        groups, tokens: number of checked groups in batches, and of checked sampled tokens in all groups.
        late: number of groups past the bound with ``on_stale: train``.
        violations: rows that break the guarantee, at most ``MOST_VIOLATIONS``; empty if it held.
    """

    progress: Progress
    steps: tuple[StepStaleness, ...]
    groups: int
    tokens: int
    late: int
    violations: tuple[Violation, ...]


class _Group(NamedTuple):
    version: int
    step: int | None  # from 0; None if its batch does not exist
    is_episode: bool


def staleness_report(connection: sqlite3.Connection) -> Report:
    """Check every batch, group and segment."""
    run_progress = progress(connection)
    batch_versions: dict[int, int] = dict(connection.execute("SELECT step, version FROM batches ORDER BY step"))
    groups = {
        group_id: _Group(version, step, is_episode=not prompt_bytes)
        for group_id, version, step, prompt_bytes in connection.execute(
            "SELECT g.id, g.version, b.step, length(g.prompt_ids) FROM groups g LEFT JOIN batches b ON b.step = g.step"
        )
    }
    steps = {step: StepStaleness(step + 1, step + 1) for step in batch_versions}
    publish_every = run_progress.settings.publish_every
    violations = [
        Violation(
            step + 1, None, f"the batch has version {version}, but its step belongs to version {step // publish_every}"
        )
        for step, version in batch_versions.items()
        if version != step // publish_every
    ]
    violations += [
        Violation(step + 1, group_id, "there is no such batch")
        for step, group_id in connection.execute(
            "SELECT step, id FROM groups WHERE step IS NOT NULL AND step NOT IN (SELECT step FROM batches)"
        )
    ]
    settings_at = _settings_at(connection, run_progress)
    late_groups = 0
    for group_id, group in groups.items():
        if group.step is None:
            continue
        staleness = batch_versions[group.step] - group.version
        steps[group.step].groups[staleness] += 1
        settings = settings_at(group.step)
        bound = settings.max_staleness
        if staleness > bound and settings.on_stale == "train":
            late_groups += 1
        elif not 0 <= staleness <= bound:
            fault = f"{staleness} versions later, and the bound is {bound}"
            if staleness < 0:
                fault = "before this version existed"
            text = f"admitted at version {group.version}, trained at version {batch_versions[group.step]}: {fault}"
            violations.append(Violation(group.step + 1, group_id, text))
    token_count = 0
    groups_with_tokens: set[int] = set()
    # The index ``segments_sizes`` answers this query without the tokens, which may be gigabytes.
    for group_id, version, count in connection.execute(
        "SELECT group_id, version, sum(length(tokens)) / 4 FROM segments GROUP BY group_id, version"
    ):
        segment_group = groups.get(group_id)
        if version == CONTEXT and segment_group and segment_group.is_episode:
            continue
        token_count += count
        if segment_group is None:
            text = f"there is no such group, but {count} tokens of version {version}"
            violations.append(Violation(None, group_id, text))
            continue
        step = segment_group.step
        if step is not None:
            groups_with_tokens.add(group_id)
            steps[step].tokens[batch_versions[step] - version] += count
        fault = ""
        if version < segment_group.version:
            fault = f"older than its group, which was admitted at version {segment_group.version}"
        elif step is not None and version > batch_versions[step]:
            fault = "newer than its batch"
        if fault:
            text = f"{count} tokens of version {version}, {fault}"
            violations.append(Violation(None if step is None else step + 1, group_id, text))
    for group_id, rollouts, crossed in connection.execute(
        "SELECT group_id, count(oldest), sum(newest > oldest) FROM rollouts GROUP BY group_id"
    ):
        if group_id in groups and (step := groups[group_id].step) is not None:
            steps[step].rollouts += rollouts
            steps[step].crossed += crossed or 0
            steps[step].dropped |= bool(rollouts) and group_id not in groups_with_tokens
    return Report(
        progress=run_progress,
        steps=tuple(steps.values()),
        groups=sum(group.step is not None for group in groups.values()),
        tokens=token_count,
        late=late_groups,
        violations=tuple(violations[:MOST_VIOLATIONS]),
    )


def _settings_at(connection: sqlite3.Connection, run_progress: Progress) -> Callable[[int], BufferSettings]:
    """Settings by step: a step's batch was taken under the settings of the last start before it."""
    starts = [
        (step, BufferSettings(**json.loads(text)))
        for step, text in connection.execute("SELECT step, settings FROM starts ORDER BY id")
    ]

    def settings_at(step: int) -> BufferSettings:
        earlier_starts = bisect_right(starts, step, key=lambda start: start[0])
        return starts[earlier_starts - 1][1] if earlier_starts else run_progress.settings

    return settings_at


def in_ranges(steps: tuple[StepStaleness, ...], rows: int) -> tuple[StepStaleness, ...]:
    """Combine steps into at most ``rows`` ranges of 1, 2, 5, 10, 20, ... steps; the last range may have fewer."""
    sizes = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    size = next(size for size in sizes if size * rows >= len(steps))
    return tuple(together(steps[start : start + size]) for start in range(0, len(steps), size))


def mean_age(counts: Counter[int]) -> float:
    """Return the mean of counts by staleness; 0 without counts."""
    return sum(age * count for age, count in counts.items()) / max(1, counts.total())


def together(steps: tuple[StepStaleness, ...]) -> StepStaleness:
    return StepStaleness(
        first_step=steps[0].first_step,
        last_step=steps[-1].last_step,
        groups=sum((step.groups for step in steps), Counter()),
        tokens=sum((step.tokens for step in steps), Counter()),
        rollouts=sum(step.rollouts for step in steps),
        crossed=sum(step.crossed for step in steps),
        dropped=any(step.dropped for step in steps),
    )
