"""The verdict on a complete disturbed run: all checks, and what they found."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from asyncrl_cli.data.loader import PromptLoader
from asyncrl_cli.journal.schema import FILE, open_for_reading
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.tasks.load import load_task
from asyncrl_cli.tasks.prompts import load_prompts
from tests.e2e.conftest import Runs, leftover_files, steps_of
from tests.e2e.faults.audit import Audit, audit
from tests.e2e.faults.disturbed import DisturbedRun
from tests.e2e.faults.evidence import read_snapshot

LOGPROB_GAP = 1e-3
"""Nats, in fp32: largest difference between engine and trainer for tokens of equal weights."""
CLEANING_S = 120.0
"""Seconds that the reaper has to clean up."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was counted, and all violations."""

    audit: Audit
    violations: tuple[str, ...]


def judge(run: DisturbedRun, before: Collection[str]) -> Verdict:
    """Check a complete run. ``before``: leftover files that existed when it started."""
    spec = load_spec(run.folder / "spec.yaml").spec
    task = load_task(spec.task, run.runs.folder)
    assert spec.data.train is not None
    loader = PromptLoader(load_prompts("train", spec.data.train, task, run.runs.folder), spec.seed, spec.data.shuffle)
    served_uids: list[str] = []

    def uid_of(serial: int) -> str:
        while len(served_uids) < serial:
            served_uids.append(loader.next().uid)
        return served_uids[serial - 1]

    with closing(open_for_reading(run.journal)) as connection:
        found = audit(connection, run.steps, uid_of)
    violations = [*found.violations, *run.evidence.contradictions]
    steps = steps_of(run.folder)
    violations += [
        f"step {step['step']}: log-probs of engine and trainer differ by {gap:.3g} nats for equal weights"
        for step in steps
        if (gap := step.get("engine/logprob_gap_max", 0.0)) > LOGPROB_GAP
    ]
    reported = [step["step"] for step in steps]
    if reported != list(range(1, run.steps + 1)):
        violations.append(f"metrics.jsonl reports {len(reported)} steps, instead of each of {run.steps} once")
    if left := left_behind(run, before):
        violations.append(f"left behind: {left}")
    return Verdict(found, tuple(violations))


def summary(run: DisturbedRun, found: Audit) -> str:
    return (
        f"{found.groups} groups, {found.rollouts} rollouts ({found.mixed_rollouts} across versions), staleness "
        f"{found.staleness}; {run.evidence.snapshots} snapshots, {run.evidence.prefixes_seen} unfinished rollouts in "
        f"them; {run.resumes} resumes"
    )


def totals(done: Sequence[tuple[DisturbedRun, Verdict]]) -> str:
    audits = [verdict.audit for _, verdict in done]
    return (
        f"{len(done)} runs; {sum(audit.groups for audit in audits)} groups trained, "
        f"{sum(audit.rollouts for audit in audits)} rollouts, {sum(audit.mixed_rollouts for audit in audits)} across "
        f"versions; {sum(run.resumes for run, _ in done)} resumes; "
        f"{sum(len(verdict.violations) for _, verdict in done)} violations"
    )


def left_behind(run: DisturbedRun, before: Collection[str]) -> list[str]:
    """Processes and files that remain of a run that has ended."""
    deadline = time.monotonic() + CLEANING_S
    while True:
        left = [*sorted(leftover_files() - set(before)), *map(str, run.living())]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def replay_violations(runs: Runs, run: DisturbedRun) -> list[str]:
    """Train the recorded batches again from the initial model: every published version must be equal."""
    ended = runs.run("replay", run.folder.name, "--runs-dir", runs.folder)
    versions = run.steps // load_spec(run.folder / "spec.yaml").spec.pipeline.publish_every
    wanted = f"all {versions} published versions of steps 1 to {run.steps} are equal"
    if ended.code == 0 and wanted in ended.out:
        return []
    return [f"replay: exit {ended.code}: {[*ended.out.splitlines(), *ended.err.splitlines()][-1:]}"]


def differences(one: Path, other: Path) -> list[str]:
    """How two runs differ in their batches and in their results."""
    snapshots = []
    for folder in (one, other):
        with closing(open_for_reading(folder / FILE)) as connection:
            snapshots.append(read_snapshot(connection))
    first, second = snapshots
    found = []
    if first.digests != second.digests:
        steps = [step for step, digest in sorted(first.digests.items()) if second.digests.get(step) != digest]
        found.append(f"{len(steps)} batches differ from the undisturbed run's; the first: step {steps[:1]}")
    if first.checksums != second.checksums:
        versions = [v for v, checksum in sorted(first.checksums.items()) if second.checksums.get(v) != checksum]
        found.append(f"{len(versions)} versions differ from the undisturbed run's; the first: {versions[:1]}")
    if (one / "model/model.safetensors").read_bytes() != (other / "model/model.safetensors").read_bytes():
        found.append("the final model differs from the undisturbed run's")
    return found
