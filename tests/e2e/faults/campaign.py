"""The long fault campaign: `make faults`.

    python -m tests.e2e.faults.campaign --kills 120 --seed 0

Real runs of fifteen kinds, each with several faults: killed and stopped processes, commands next to a run, and what
users do between two drivers. The journal of a complete run is audited and compared with every
snapshot that was taken during the run; its recorded batches are trained again and must give the same weights; and a run
without staleness must equal a run without faults, bit for bit. Prints a line per kill and a table; exits with 1 if any
check fails.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count, cycle, islice
from pathlib import Path
from typing import Any

from tests import small_models
from tests.e2e.conftest import ROOT, Runs, leftover_files
from tests.e2e.faults.audit import Audit
from tests.e2e.faults.companions import AgentsRun, TrackedRun
from tests.e2e.faults.disturbed import DisturbedRun, Hung
from tests.e2e.faults.incidents import inject
from tests.e2e.faults.verdict import Verdict, differences, judge, replay_violations, summary, totals
from tests.monitors.mlflow_server import Server
from tests.spell_backward import SpellBackward

STEPS = 200
FAULTS_A_RUN = 5
LONG_SUMS: dict[str, Any] = {
    "model": {},
    "task": {"options": {"min_terms": 5, "max_terms": 6}},
    "journal": {"segment_seconds": 0.05},
}
"""Longer responses, recorded often: at any moment many rollouts are unfinished, with some tokens in the journal."""
RANDOM_WEIGHTS: dict[str, Any] = {**small_models.UNTRAINED, "max_length": 128}
COMPARED = "no staleness"
"""Runs of this kind must equal a run without faults, bit for bit: without staleness the content of a batch does not
depend on chance, and an interrupted rollout continues with the same random numbers (decision 0064)."""

TRACKED = "tracked"
OUTSIDE = "outside agents"
KINDS: dict[str, dict[str, Any]] = {
    "async": {"checkpoints": {"every": 10}, "evaluation": {"every": 30, "prompts": 16}},
    COMPARED: {**LONG_SUMS, "pipeline": {"max_staleness": 0}, "checkpoints": {"every": 7}},
    "two engines": {**LONG_SUMS, "rollout": {"engines": 2, "max_running_rollouts": 32}, "checkpoints": {"every": 10}},
    "two ranks": {"trainer": {"ranks": 2, "zero_stage": 3}, "checkpoints": {"every": 8}},
    "recompute": {
        **LONG_SUMS,
        "pipeline": {"max_staleness": 3, "publish_every": 2, "weight_update": "recompute"},
        "checkpoints": {"every": 10},
    },
    "requeue": {**LONG_SUMS, "pipeline": {"max_staleness": 1, "on_stale": "requeue"}, "checkpoints": {"every": 12}},
    # Slow learning: once the model solves the task, 98 % of the groups are uniform, and a step takes ten seconds.
    "reject": {
        "algorithm": {"uniform_groups": "reject"},
        "trainer": {"optimizer": {"learning_rate": 2e-5}},
        "checkpoints": {"every": 9},
    },
    "one step off": {"pipeline": {"mode": "one_step_off", "max_staleness": 1}, "checkpoints": {"every": 40}},
    "images": {
        "model": {"path": str(ROOT / "specs/models/shapes-vl-0.5M"), "max_images": 1, "max_length": 96},
        "task": {"use": "shapes:Shapes"},
        "rollout": {"max_prompt_tokens": 48, "max_response_tokens": 32},
        "checkpoints": {"every": 10},
    },
    "group rewards": {
        "model": RANDOM_WEIGHTS,
        "task": {"use": "spell_backward:Ranked"},
        "data": {"train": {"path": "words.jsonl"}, "eval": None},
        "checkpoints": {"every": 10},
    },
    "turns": {
        "model": RANDOM_WEIGHTS,
        "task": {"use": "spell_backward:Repeated"},
        "data": {"eval": {"size": 16}},
        "rollout": {"max_response_tokens": 12},
        "evaluation": {"every": 20},
        "checkpoints": {"every": 10},
    },
    "supervised": {
        "model": {
            "warm_start": {
                "data": {"path": "sums.jsonl"},
                "response_column": "completion",
                "epochs": 60,
                "steps": 200,
                "batch_size": 20,
                "held_out_rows": 20,
                "evaluate_every": 25,
                "learning_rate": 1.0e-4,
            }
        },
        "checkpoints": {"every": 8},
    },
    "uploads": {
        "checkpoints": {"every": 4, "keep_best": 2, "upload": "file://…"},
        "evaluation": {"every": 4, "prompts": 32, "fix_version": True},
    },
    TRACKED: {"tracking": {"mlflow": True}, "checkpoints": {"every": 10}},
    OUTSIDE: {
        "model": {**small_models.UNTRAINED, "max_length": 128},
        "task": {"use": "external", "episode": {"timeout_s": 15}},
        "data": {"train": {"path": str(ROOT / "templates/agent/prompts.jsonl")}, "eval": None},
        "rollout": {"group_size": 4, "max_response_tokens": 12, "max_failed_share": 0.9},
        "checkpoints": {"every": 10},
    },
}
"""What each kind of run changes in the base spec."""

FAULTS = (
    *("driver settled", "driver save", "driver publish", "driver commit", "driver last"),
    *("driver settled, driver resume", "driver save, driver resume", "driver publish, driver resume, driver resume"),
    *("driver commit, trainer resume", "driver settled, agent resume", "driver publish, engine resume"),
    *("trainer save, driver soon", "engine settled, driver soon"),
    *("driver commit", "driver commit", "driver commit, trainer soon", "trainer settled, driver soon"),
    *("trainer settled", "trainer publish", "trainer publish", "trainer save", "trainer save", "trainer commit"),
    *("trainer settled, trainer soon", "engine settled, trainer soon"),
    *("engine settled", "engine publish", "engine publish", "engine save", "engine settled, engine soon"),
    *("core settled", "core publish", "core publish", "core commit", "trainer settled, core soon", "core soon"),
    *("agent settled", "agent publish", "agent publish", "agent publish, engine soon", "agent settled, trainer soon"),
    *("scorer settled", "scorer commit", "scorer publish, scorer soon", "driver settled, scorer resume"),
    *("engine settled, engine soon, engine soon", "trainer settled, trainer soon, trainer soon"),
    *("driver around", "trainer around", "engine around", "agent around", "core around"),
    *("stopped:driver settled", "stopped:trainer around", "stopped:engine settled", "stopped:core around"),
    *("stopped:agent around", "stopped:scorer settled"),
    *("beside:replay settled", "beside:evaluate settled", "beside:report settled", "beside:verify save"),
    *("beside:resume settled", "beside:prune save"),
    *("between:prune settled", "between:prune save", "between:two-resumes settled", "between:two-resumes publish"),
    "between:read-only settled",
)
"""Faults as `part moment`; faults joined by a comma follow each other in the same run."""
FAULTS_OF_KIND: dict[str, tuple[str, ...]] = {
    "group rewards": ("between:changed-rows settled",),
    "turns": ("gateway settled", "player settled", "stopped:gateway settled", "stopped:player settled"),
    "supervised": ("driver warming", "trainer warming", "driver warming"),
    "uploads": ("driver save", "driver save, driver resume"),
    TRACKED: ("tracker settled", "tracker soon", "server:killed settled", "server:stopped settled"),
    OUTSIDE: ("program settled", "gateway settled", "program publish, driver soon", "stopped:gateway settled"),
}
"""Faults that only some kinds of runs can have. Each of their runs has them, before the others."""


@dataclass(slots=True)
class Campaign:
    runs: Runs
    seed: int
    say: Any = print
    undisturbed: Path | None = None
    done: list[tuple[str, DisturbedRun, Verdict]] = field(default_factory=list)
    kills: int = 0

    def do_run(self, kind: str, faults: list[str], number: int) -> None:
        before = leftover_files()
        run = self._run(kind, f"{self.seed}/{number}")
        started = time.monotonic()
        self.say(f"run {number}, {kind}: {'; '.join(faults)}")
        late = 0
        try:
            run.start()
            late = sum(not inject(run, fault) for follow in faults for fault in follow.split(", "))
            run.finish()
            run.measure()
            verdict = judge(run, before)
            problems = [*verdict.violations, *replay_violations(self.runs, run)]
            if kind == COMPARED:
                problems += differences(run.folder, self._undisturbed())
            found = verdict.audit
        except Hung as hung:
            problems, found = [str(hung)], Audit(0, 0, 0, 0, ())
        finally:
            run.end()
        for kill in run.kills:
            self.kills += 1
            back = "-" if kill.back_s is None else f"{kill.back_s:.1f} s"
            self.say(
                f"  kill {self.kills:3}  {kill.part:20} {kill.moment:8} at step {kill.step:3}, "
                f"next step trained after {back}"
            )
        self.say(f"  {summary(run, found)}; {late} faults came too late; {time.monotonic() - started:.0f} s")
        problems += [f"the driver stopped by itself: {stop}" for stop in run.stops]
        for problem in problems:
            self.say(f"  VIOLATION {problem}")
        self.done.append((kind, run, Verdict(found, tuple(problems))))

    def _run(self, kind: str, seed: str) -> DisturbedRun:
        changes = {name: dict(section) for name, section in KINDS[kind].items()}
        changes["pipeline"] = {**changes.get("pipeline", {}), "max_restarts": 1000}
        if "upload" in changes.get("checkpoints", {}):
            changes["checkpoints"]["upload"] = f"file://{self.runs.folder}/uploads"
        write_data(self.runs.folder)
        if kind == TRACKED:
            server = Server(self.runs.folder)
            changes["tracking"]["uri"] = server.uri
        spec = self.runs.write_spec(stop={"steps": STEPS, "on_unhealthy": "never"}, **changes)
        arguments = (self.runs, spec, STEPS, random.Random(seed), self.say)
        if kind == TRACKED:
            return TrackedRun(*arguments, server=server)
        return AgentsRun(*arguments) if kind == OUTSIDE else DisturbedRun(*arguments)

    def _undisturbed(self) -> Path:
        if self.undisturbed is None:
            undisturbed = self._run(COMPARED, "")
            undisturbed.start()
            undisturbed.finish(resumes=1)
            self.undisturbed = undisturbed.folder
        return self.undisturbed

    def table(self) -> Iterator[str]:
        """Kills by part and moment, and what was found."""
        counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        back: dict[str, list[float]] = defaultdict(list)
        moments = sorted({kill.moment for _, run, _ in self.done for kill in run.kills})
        for _, run, _ in self.done:
            for kill in run.kills:
                counts[kill.part][kill.moment] += 1
                if kill.back_s is not None:
                    back[kill.part].append(kill.back_s)
        yield f"{'':20}" + "".join(f"{moment:>9}" for moment in moments) + f"{'kills':>9}{'median back':>13}"
        for part, by_moment in sorted(counts.items()):
            times = sorted(back[part])
            median = f"{times[len(times) // 2]:.1f} s" if times else "-"
            cells = "".join(f"{by_moment[moment] or '':>9}" for moment in moments)
            yield f"{part:20}{cells}{sum(by_moment.values()):>9}{median:>13}"
        yield f"{self.kills} kills over {totals([(run, verdict) for _, run, verdict in self.done])}"


def schedule(seed: int) -> Iterator[tuple[str, list[str]]]:
    """Endless: the kinds of runs in turn, each with some faults in random order."""
    order = random.Random(seed)
    faults = chain.from_iterable(order.sample(FAULTS, len(FAULTS)) for _ in count())
    for kind in cycle(KINDS):
        # Faults at the moment `last` can only be the last ones of a run.
        drawn = sorted(islice(faults, FAULTS_A_RUN), key=lambda fault: fault.endswith("last"))
        if kind == OUTSIDE:  # programs bring the rewards
            drawn = [fault for fault in drawn if "scorer" not in fault]
        yield kind, [*FAULTS_OF_KIND.get(kind, ()), *drawn]


def write_data(folder: Path) -> None:
    """Write the files that some kinds of runs read: a module, words, and sums for supervised steps."""
    shutil.copy(ROOT / "specs/shapes.py", folder)
    words = ({"uid": prompt.uid, "prompt": prompt.content} for prompt in SpellBackward().prompts("train", 2000))
    sums = ({"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(10) for b in range(10))
    for name, rows in (("words", words), ("sums", sums)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def own_folder(given: Path | None, prefix: str) -> Path:
    """The folder of a campaign's runs. It gets the runs' temporary files, too: what other runs on this machine have in
    theirs at the same time is not left behind by the campaign."""
    folder = given or Path(tempfile.mkdtemp(prefix=prefix))
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="c")  # short: it holds the sockets of Ray
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)
    return folder.resolve()


def timed_lines() -> Callable[[str], None]:
    """A function that prints lines with the seconds since this call."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {text}", flush=True)

    return say


def conclude(table: Iterable[str], done: Iterable[tuple[str, DisturbedRun, Verdict]]) -> int:
    """Print the table and the runs with violations; returns the exit code."""
    print()
    for line in table:
        print(line)
    violating = [(kind, run) for kind, run, verdict in done if verdict.violations]
    for kind, run in violating:
        print(f"violated by {kind}: {run.folder}")
    return 1 if violating else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=120, help="start no more runs after this many kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(KINDS), help="only runs of this kind")
    parser.add_argument("--folder", type=Path, help="where the runs are kept; default: a temporary folder")
    arguments = parser.parse_args()
    campaign = Campaign(Runs(own_folder(arguments.folder, "faults-")), arguments.seed, timed_lines())
    for number, (kind, faults) in enumerate(schedule(arguments.seed)):
        if campaign.kills >= arguments.kills:
            break
        if arguments.only in (None, kind):
            campaign.do_run(kind, faults, number)
    return conclude(campaign.table(), campaign.done)


if __name__ == "__main__":
    sys.exit(main())
