"""The same spec in `sync`, `one_step_off` and `async`: trained tokens per second, and the bottleneck of each mode.

    python benchmarks/async_vs_sync.py [--steps N] [--repeats N] [--modes MODE ...] [--group-sizes N ...]

Response lengths have a long tail (long_tail.py) and do not change, because the learning rate is almost zero. Only the
training loop is timed, without start-up. One engine and one trainer rank have one thread each.

Every step has 128 rollouts. `--group-sizes 8 1` shows the cost of waiting for a group's slowest rollout: groups of
one are trained with `preset: single_rollout`.
"""

from __future__ import annotations

import argparse
import shutil
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml
from common import INIT, header, metrics, row, run_spec

from asyncrl_cli.journal.schema import FILE

SKIPPED_STEPS = 4
"""Number of steps at the start that are not timed, because the pipeline fills and caches warm up."""

ROLLOUTS = 128
"""Rollouts of a step."""
GROUP_SIZE = 8

MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "one_step_off": {"mode": "one_step_off"},
    "async": {"mode": "async", "max_staleness": 4},
}


def spec(runs_dir: Path, mode: str, steps: int, group_size: int = GROUP_SIZE) -> dict[str, Any]:
    """The benchmark's spec. `sync` runs at most one batch at a time; the other modes have room for two."""
    return {
        "name": mode.replace("_", "-"),
        "runs_dir": str(runs_dir),
        "model": {
            "init": INIT,
            "warm_start": {
                "steps": 150,
                "batch_size": 24,
                "learning_rate": 3.0e-3,
                "schedule": {"kind": "cosine", "warmup_updates": 30, "final_fraction": 0.05},
                "data": {"path": "long_tail:demonstrations", "size": 3600},
                "response_column": "response",
            },
            "max_length": 264,
        },
        "task": {"use": "long_tail:LongTail"},
        "data": {"train": {"size": 10_000}, "eval": {"size": 1}},
        "rollout": {
            "group_size": group_size,
            "max_running_rollouts": 128 if mode == "sync" else 256,
            "max_prompt_tokens": 8,
            "max_response_tokens": 256,
        },
        "algorithm": {"preset": "single_rollout"} if group_size == 1 else {"uniform_groups": "train"},
        "trainer": {"optimizer": {"learning_rate": 1.0e-6}, "tokens_per_microbatch": 2048},
        "pipeline": {"groups_per_step": ROLLOUTS // group_size, **MODES[mode]},
        "tracking": {"mlflow": False},
        "stop": {"steps": steps},
    }


def measure(run: Path) -> dict[str, float]:
    """Rates over the middle steps, after the pipeline has filled and before it drains."""
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
        "trainer processor s": total("cpu/trainer_s") / (len(timed) - 1),
        "group wait s": group_wait_s(run),
    }


def group_wait_s(run: Path) -> float:
    """Mean time (s) from the end of a trained rollout to the end of the last one in its group."""
    with closing(sqlite3.connect(run / FILE)) as journal:
        (found,) = journal.execute(
            "SELECT avg(last - r.recorded_at) FROM rollouts r JOIN (SELECT group_id, max(recorded_at) AS last "
            "FROM rollouts GROUP BY 1) USING (group_id) JOIN groups g ON g.id = group_id WHERE g.step IS NOT NULL"
        ).fetchone()
    return float(found)


def bound(figures: dict[str, float]) -> str:
    """The mode's bottleneck, as text."""
    trainer, engine = figures["trainer busy"], figures["engine busy"]
    if trainer + engine < 1.2:
        return "each waits for the other"
    return "the trainer" if trainer > engine else "generation"


def train(runs_dir: Path, mode: str, steps: int, repeat: int, group_size: int = GROUP_SIZE) -> Path:
    """One run; returns its folder."""
    print(f"running {mode}, groups of {group_size}, {repeat}", file=sys.stderr, flush=True)
    return run_of(runs_dir, spec(runs_dir, mode, steps, group_size))


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
    parser.add_argument("--repeats", type=int, default=1, help="runs of each kind, taken in turn; the median counts")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--group-sizes", nargs="+", type=int, choices=(8, 4, 2, 1), default=[GROUP_SIZE])
    arguments = parser.parse_args()

    kinds = [(mode, size) for mode in arguments.modes for size in arguments.group_sizes]
    figures: dict[tuple[str, int], list[dict[str, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for repeat in range(1, arguments.repeats + 1):
            for mode, size in kinds:
                figures[mode, size].append(measure(train(Path(folder), mode, arguments.steps, repeat, size)))

    median = {
        kind: sorted(runs, key=lambda run: run["trained tokens/s"])[len(runs) // 2] for kind, runs in figures.items()
    }
    first = median[kinds[0]]
    base = first["trained tokens/s"]
    names = (
        "mode",
        "group size",
        "trained tokens/s",
        "ratio to the first",
        "step s",
        "trainer processor s",
        "trainer busy",
    )
    print(header(*names, "engine busy", "staleness", "waits for its group s", "bound by"))
    for (mode, size), run in median.items():
        cells = (
            mode,
            str(size),
            f"{run['trained tokens/s']:,.0f}",
            f"{run['trained tokens/s'] / base:.2f}",
            f"{run['step s']:.2f}",
            f"{run['trainer processor s']:.2f}",
            f"{run['trainer busy']:.0%}",
            f"{run['engine busy']:.0%}",
            f"{run['staleness mean']:.1f}",
            f"{run['group wait s']:.2f}",
            bound(run),
        )
        print(row(*cells))
    print(f"\nresponses: {first['length mean']:.1f} tokens on average, {first['length max']:.0f} the longest")


if __name__ == "__main__":
    main()
