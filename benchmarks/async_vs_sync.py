"""The same spec in `sync`, `one_step_off` and `async`: trained tokens per second, and the bottleneck of each mode.

    python benchmarks/async_vs_sync.py [--steps N] [--repeats N]

The lengths of the responses have a long tail (long_tail.py), and the learning rate is almost zero, so that the lengths
do not change. Only the training loop is timed, without start-up. One engine and one trainer rank, with one thread each.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from common import QUICKSTART, header, metrics, row, run_spec

SKIPPED_STEPS = 4
"""Steps at the start that are not timed: the pipeline fills, and caches warm up."""

MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "one_step_off": {"mode": "one_step_off"},
    "async": {"mode": "async", "max_staleness": 4},
}


def spec(runs_dir: Path, mode: str, steps: int) -> dict[str, Any]:
    """The benchmark's spec. `sync` runs at most one batch at a time; the other modes have room for two."""
    return {
        "name": mode.replace("_", "-"),
        "runs_dir": str(runs_dir),
        "model": {
            "init": yaml.safe_load(QUICKSTART.read_text())["model"]["init"],
            "warm_start": {"steps": 150},
            "max_length": 264,
        },
        "task": {"use": "long_tail:LongTail"},
        "data": {"train": {"size": 10_000}, "eval": {"size": 1}},
        "rollout": {
            "group_size": 8,
            "max_running_rollouts": 128 if mode == "sync" else 256,
            "max_prompt_tokens": 8,
            "max_response_tokens": 256,
        },
        "algorithm": {"uniform_groups": "train"},
        "trainer": {"optimizer": {"learning_rate": 1.0e-6}, "tokens_per_microbatch": 2048},
        "pipeline": {"groups_per_step": 16, **MODES[mode]},
        "tracking": {"mlflow": False},
        "stop": {"steps": steps},
    }


def measure(run: Path) -> dict[str, float]:
    """Rates over the middle steps, without those in which the pipeline fills or drains."""
    rows = metrics(run)
    drained = int(yaml.safe_load((run / "spec.yaml").read_text())["pipeline"]["max_staleness"]) + 1
    timed = rows[SKIPPED_STEPS : len(rows) - drained]
    seconds = timed[-1]["time"] - timed[0]["time"]

    def total(name: str) -> float:
        return float(sum(row[name] for row in timed[1:]))

    def share(name: str) -> float:
        return float(sum(row[name] * row["time/step_s"] for row in timed[1:])) / total("time/step_s")

    return {
        "trained tokens/s": total("tokens/trained") / seconds,
        "generated tokens/s": total("tokens/generated") / seconds,
        "step s": seconds / (len(timed) - 1),
        "trainer busy": share("share/trainer_busy"),
        "engine busy": share("share/engines_busy"),
        "length mean": sum(row["response/tokens_mean"] for row in timed) / len(timed),
        "length max": max(row["response/tokens_max"] for row in timed),
        "staleness mean": sum(row["staleness/groups_mean"] for row in timed) / len(timed),
    }


def bound(figures: dict[str, float]) -> str:
    """A text that states what the mode waits for."""
    trainer, engine = figures["trainer busy"], figures["engine busy"]
    if trainer + engine < 1.2:
        return "each waits for the other"
    return "the trainer" if trainer > engine else "generation"


def train(runs_dir: Path, mode: str, steps: int, repeat: int) -> Path:
    """One run; returns its folder."""
    print(f"running {mode}, {repeat}", file=sys.stderr, flush=True)
    return run_of(runs_dir, spec(runs_dir, mode, steps))


def run_of(runs_dir: Path, settings: dict[str, Any]) -> Path:
    """A run of a spec on the tasks of long_tail.py; returns its folder."""
    path = runs_dir / "spec.yaml"
    shutil.copy(Path(__file__).with_name("long_tail.py"), runs_dir)
    path.write_text(yaml.safe_dump(settings))
    known = set(runs_dir.glob("*/manifest.json"))
    run_spec(path)
    (made,) = set(runs_dir.glob("*/manifest.json")) - known
    return made.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="steps of each run")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each mode, taken in turn; the median counts")
    arguments = parser.parse_args()

    figures: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for repeat in range(1, arguments.repeats + 1):
            for mode in MODES:
                figures[mode].append(measure(train(Path(folder), mode, arguments.steps, repeat)))

    median = {
        mode: sorted(runs, key=lambda run: run["trained tokens/s"])[len(runs) // 2] for mode, runs in figures.items()
    }
    base = median["sync"]["trained tokens/s"]
    names = ("mode", "trained tokens/s", "ratio to sync", "step s", "trainer busy", "engine busy", "staleness")
    print(header(*names, "bound by"))
    for mode, run in median.items():
        cells = (
            mode,
            f"{run['trained tokens/s']:,.0f}",
            f"{run['trained tokens/s'] / base:.2f}",
            f"{run['step s']:.2f}",
            f"{run['trainer busy']:.0%}",
            f"{run['engine busy']:.0%}",
            f"{run['staleness mean']:.1f}",
            bound(run),
        )
        print(row(*cells))
    lengths = median["sync"]
    print(f"\nresponses: {lengths['length mean']:.1f} tokens on average, {lengths['length max']:.0f} the longest")


if __name__ == "__main__":
    main()
