"""Predictions of `asyncrl plan` from one run of the quickstart, compared with runs with other settings.

    python benchmarks/plan.py [--steps N] [--only NAME ...] [--learn] [--json FILE]

One run at staleness 2 is measured; `sync`, `one_step_off`, staleness 4 and half of the concurrency are predicted from
it, and then run. Each run takes the time of its steps and about one more minute; everything together less than 20
minutes on two idle cores. The learning rate is almost zero: lengths do not change, so all errors come from the model of
the machine. `--learn` uses the spec's learning rate. A second table has each run's processor time per step: if trainer
and engines share processors, it helps to explain a prediction's errors. Nothing else may use the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ASYNCRL, QUICKSTART, header, metrics, overrides, row

CALIBRATION = "staleness 2"
RUNS: dict[str, list[str]] = {
    CALIBRATION: [],
    "sync": ["pipeline.mode=sync"],
    "one_step_off": ["pipeline.mode=one_step_off"],
    "staleness 4": ["pipeline.max_staleness=4"],
    "half concurrency": ["rollout.max_running_rollouts=128"],
}
PROCESSORS = (
    "time/step_s",
    "time/train_s",
    "time/update_s",
    "time/publish_wait_s",
    "engines/requests_mean",
    "cpu/trainer_s",
)
LIMIT_S = 600
"""The time limit of one run."""


@dataclass(frozen=True)
class Row:
    """Predicted and measured values of one run; shares in percentage points."""

    name: str
    predicted_s: float
    measured_s: float
    worst_share: float
    staleness: tuple[float, float]


def main() -> None:
    """Run, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="steps of each run")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=RUNS,
        default=list(RUNS),
        metavar="NAME",
        help=f"of {', '.join(RUNS)}; always {CALIBRATION} and sync",
    )
    parser.add_argument("--learn", action="store_true", help="keep the quickstart's learning rate")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="asyncrl-plan-") as folder:
        usual = [f"runs_dir={folder}", f"stop.steps={arguments.steps}", "evaluation.every=0", "checkpoints.every=0"]
        if not arguments.learn:
            usual.append("trainer.optimizer.learning_rate=1e-8")
        runs = {}
        for name, changes in ((name, RUNS[name]) for name in RUNS if name in {CALIBRATION, "sync", *arguments.only}):
            runs[name] = _train([*usual, *changes])
            print(f"{name}: ran, {time.monotonic() - began:.0f} s so far", file=sys.stderr)
        documents = {name: _plan([*usual, *RUNS[name]], runs[CALIBRATION], run) for name, run in runs.items()}
        processors = {name: _processors(run) for name, run in runs.items()}
    rows = [_row(name, document) for name, document in documents.items()]
    _print(rows, documents[CALIBRATION]["calibration"], time.monotonic() - began)
    _print_processors(processors)
    if arguments.json:
        arguments.json.write_text(json.dumps({"plans": documents, "processors": processors}, indent=1))


def _asyncrl(*arguments: str) -> str:
    done = subprocess.run([*ASYNCRL, *arguments], stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        sys.exit(f"`asyncrl {' '.join(arguments)}` ended with {done.returncode}")
    return done.stdout


def _train(changes: list[str]) -> Path:
    folder = Path(changes[0].partition("=")[2])
    _asyncrl("train", str(QUICKSTART), "--quiet", *overrides(changes))
    return max(folder.glob("quickstart-*"), key=lambda run: run.stat().st_ctime)


def _plan(changes: list[str], calibration: Path, run: Path) -> dict[str, Any]:
    """The prediction from one run, and under ``measured`` the measurements of the run with these changes."""

    def planned(source: Path) -> dict[str, Any]:
        words = [*overrides(changes), "--calibrate-from", f"{source}/", "--json"]
        document: dict[str, Any] = json.loads(_asyncrl("plan", str(QUICKSTART), *words))
        return document

    return planned(calibration) | {"measured": planned(run)["calibration"]["reproduced"]}


def _row(name: str, document: dict[str, Any]) -> Row:
    measured = {line["name"]: line["measured"] for line in document["measured"]}
    outcome = document["plan"]["outcome"]
    shares = outcome["trainer_shares"]
    predicted = {
        "trainer trains": shares["training"],
        "trainer publishes": shares.get("publishing", 0.0) + shares.get("publish", 0.0),
        "trainer waits": sum(shares.get(part, 0.0) for part in ("groups", "missing", "other")),
        "engines idle": outcome["engines_idle"],
    }
    worst_share = max((predicted[part] - measured[part] for part in predicted if part in measured), key=abs)
    staleness = (outcome["mean_staleness"], measured["mean staleness"])
    return Row(name, outcome["step_s"], measured["step"], 100 * worst_share, staleness)


def _processors(run: Path) -> dict[str, float]:
    """Means over a run's steps, without the first third, while the pipeline fills."""
    steps = metrics(run)
    steps = steps[len(steps) // 3 :]
    return {name: sum(step[name] for step in steps) / len(steps) for name in PROCESSORS}


def _print_processors(of_runs: dict[str, dict[str, float]]) -> None:
    print(f"\nMeans of a step:\n{header('run', *PROCESSORS)}")
    for name, means in of_runs.items():
        print(row(name, *(f"{means[metric]:.3f}" for metric in PROCESSORS)))


def _print(rows: list[Row], calibration: dict[str, Any], seconds: float) -> None:
    sync = next(row for row in rows if row.name == "sync")
    names = ("run", "step s: predicted, measured", "error", "ratio to sync: predicted, measured", "error")
    print(f"\n{header(*names, 'largest difference of a share', 'mean staleness')}")
    for run in rows:
        ratios = sync.predicted_s / run.predicted_s, sync.measured_s / run.measured_s
        cells = (
            run.name,
            f"{run.predicted_s:.3f}, {run.measured_s:.3f}",
            f"{run.predicted_s / run.measured_s - 1:+.1%}",
            f"{ratios[0]:.2f}, {ratios[1]:.2f}",
            f"{ratios[0] / ratios[1] - 1:+.1%}",
            f"{run.worst_share:+.0f} points",
            f"{run.staleness[0]:.2f}, {run.staleness[1]:.2f}",
        )
        print(row(*cells))
    print(f"\nengine {calibration['engine']}\ntrainer {calibration['trainer']}\n{seconds:.0f} s in all")


if __name__ == "__main__":
    main()
