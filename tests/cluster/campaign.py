"""The long campaign over several hosts: part of `make cluster`.

    python -m tests.cluster.campaign --events 30 --seed 0

Real runs on test hosts: the head with the driver and rank 0, a host with rank 1, a host with two engines (or with
``--engine-hosts 3`` three hosts with one each), and another host for an engine that joins. During a run, hosts are
killed, partitioned and slowed down, their disks are full, and engines join. A complete run is checked like the runs of
`make faults`: its journal is audited and compared with all snapshots that were taken during the run, and its recorded
batches are trained again. A run without staleness must equal a run without faults, bit for bit. Prints a line per
event and a table; exits with 1 if any check fails.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.events import ALL, WITHOUT_EFFECT, Site
from tests.cluster.hosts import Network, why_not
from tests.cluster.runs import HostedRun, HostedRuns
from tests.e2e.conftest import leftover_files, rows
from tests.e2e.faults.audit import Audit
from tests.e2e.faults.campaign import LONG_SUMS, conclude, own_folder, timed_lines
from tests.e2e.faults.disturbed import Hung
from tests.e2e.faults.verdict import Verdict, differences, judge, replay_violations, summary, totals

EVENTS_A_RUN = 6
STEPS_AN_EVENT = 60
TOLERANCE = 1e-3
"""Nats, in fp32 (docs/metrics.md)."""
COMPARED = "no staleness"
KINDS: dict[str, dict[str, Any]] = {
    "async": {**LONG_SUMS, "checkpoints": {"every": 10}},
    "recompute": {
        **LONG_SUMS,
        "pipeline": {"max_staleness": 3, "publish_every": 2, "weight_update": "recompute"},
        "checkpoints": {"every": 10},
    },
    COMPARED: {"pipeline": {"max_staleness": 0}, "checkpoints": {"every": 10}, "journal": {"segment_seconds": 600.0}},
}
"""Changes to the base spec, by kind of run. All runs have two ranks with ZeRO-3 and two to four engines."""


@dataclass(slots=True)
class Campaign:
    folder: Path
    seed: int
    events_a_run: int
    engine_hosts: int
    say: Any = print
    done: list[tuple[str, HostedRun, Verdict]] = field(default_factory=list)

    @property
    def events(self) -> int:
        return sum(len(run.kills) for _, run, _ in self.done)

    @property
    def steps(self) -> int:
        return STEPS_AN_EVENT * self.events_a_run

    def do_run(self, kind: str, number: int) -> None:
        """Do one run of this kind on new hosts, with its events."""
        folder = self.folder / f"run-{number}"
        folder.mkdir()
        chance = random.Random(f"{self.seed}/{number}")
        usable = WITHOUT_EFFECT if kind == COMPARED else ALL
        events = [
            event for _ in range(0, self.events_a_run, len(usable)) for event in chance.sample(usable, len(usable))
        ]
        started, before = time.monotonic(), leftover_files()
        models = self.folder / "models"  # one initial model for all runs
        models.mkdir(exist_ok=True)
        (folder / "models").symlink_to(models)
        with Network(folder, kept=[models]) as network:
            site = Site.ready(network, self.engine_hosts)
            run = self._run(kind, site, number)
            self.say(f"run {number}, {kind}: hosts ready after {time.monotonic() - started:.0f} s")
            late, problems = 0, []
            try:
                run.start()
                for event in events[: self.events_a_run]:
                    late += not site.inject(run, event)
                site.restore()
                run.finish()
                run.measure()
                verdict = judge(run, before)
                problems += [*verdict.violations, *replay_violations(run.runs, run), *_wrong_weights(run)]
                if kind == COMPARED:
                    problems += self._differences_from_undisturbed(site, run, number)
                found = verdict.audit
            except Hung as hung:
                run.end()
                problems, found = [str(hung)], Audit(0, 0, 0, 0, ())
            problems += [f"the driver stopped by itself: {stop}" for stop in run.stops]
            for kill in run.kills:
                back = "-" if kill.back_s is None else f"{kill.back_s:.1f} s"
                self.say(f"  {kill.part:22} at step {kill.step:3}, next step trained after {back}")
            self.say(f"  {summary(run, found)}; {late} events came too late; {time.monotonic() - started:.0f} s")
            for problem in problems:
                self.say(f"  VIOLATION {problem}")
            self.done.append((kind, run, Verdict(found, tuple(problems))))

    def _run(self, kind: str, site: Site, number: int) -> HostedRun:
        changes = {name: dict(section) for name, section in KINDS[kind].items()}
        changes["pipeline"] = {**changes.get("pipeline", {}), "max_restarts": 1000}
        changes["trainer"] = {"ranks": 2, "zero_stage": 3}
        changes["rollout"] = {"engines": {"min": 1, "max": max(2, self.engine_hosts) + 1}, "max_running_rollouts": 32}
        runs = HostedRuns(self.folder / f"run-{number}", site.cluster)
        spec = runs.write_spec(stop={"steps": self.steps}, **changes)
        return HostedRun(runs, spec, self.steps, random.Random(f"{self.seed}/{number}"), self.say)

    def _differences_from_undisturbed(self, site: Site, run: HostedRun, number: int) -> list[str]:
        undisturbed = self._run(COMPARED, site, number)
        undisturbed.start()
        undisturbed.finish(resumes=1)
        return differences(run.folder, undisturbed.folder)

    def table(self) -> Iterator[str]:
        """The number of each event, and the findings."""
        back: dict[str, list[float]] = defaultdict(list)
        counts: dict[str, int] = defaultdict(int)
        for _, run, _ in self.done:
            for kill in run.kills:
                counts[kill.part] += 1
                back[kill.part] += [] if kill.back_s is None else [kill.back_s]
        yield f"{'':22}{'events':>8}{'median':>10}{'longest':>10}"
        for name, count in sorted(counts.items()):
            times = sorted(back[name]) or [float("nan")]
            yield f"{name:22}{count:>8}{times[len(times) // 2]:>8.1f} s{times[-1]:>8.1f} s"
        yield f"{self.events} events over {totals([(run, verdict) for _, run, verdict in self.done])}"


def _wrong_weights(run: HostedRun) -> Iterator[str]:
    """Versions that an engine served with other weights than the trainer's, found by their tokens' log-probs."""
    if (gap := run.ask("SELECT max(gap) FROM publishes")) > TOLERANCE:
        yield f"an engine that proved its weights differed by {gap:.3g} nats"
    for row in rows(run.folder, "metrics.jsonl"):
        if (gap := row.get("engine/logprob_gap_max") or 0.0) > TOLERANCE:
            yield f"step {row['step']}: tokens of the trainer's own version differ by {gap:.3g} nats"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=30, help="start no more runs after this many events")
    parser.add_argument("--events-a-run", type=int, default=EVENTS_A_RUN)
    parser.add_argument("--engine-hosts", type=int, default=1, help="hosts with engines, without the guest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(KINDS), help="only runs of this kind")
    parser.add_argument("--folder", type=Path, help="where the runs are kept; default: a temporary folder")
    arguments = parser.parse_args()
    if reason := why_not():
        print(f"skipped: {reason}")
        return 0
    folder = own_folder(arguments.folder, "cluster-")
    campaign = Campaign(folder, arguments.seed, arguments.events_a_run, arguments.engine_hosts, timed_lines())
    kinds = [arguments.only] if arguments.only else list(KINDS)
    number = 0
    while campaign.events < arguments.events:
        campaign.do_run(kinds[number % len(kinds)], number)
        number += 1
    return conclude(campaign.table(), campaign.done)


if __name__ == "__main__":
    sys.exit(main())
