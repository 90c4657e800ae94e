"""What the ways to replace an engine's weights cost, and what they leave in the log-probs.

    python benchmarks/weight_updates.py [--steps N]

The same spec in `async` with `keep`, `recompute` and `drain`, and in `sync` with partial rollouts (abort and continue).
The model is a random one, so the lengths of its responses have a geometric tail and most rollouts cross a version; it
learns at a rate that matters, so old keys and values do, too. The spec is that of async_vs_sync.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from async_vs_sync import SKIPPED_STEPS, spec

WAYS: dict[str, dict[str, Any]] = {
    "keep": {"mode": "async", "max_staleness": 2, "weight_update": "keep"},
    "recompute": {"mode": "async", "max_staleness": 2, "weight_update": "recompute"},
    "drain": {"mode": "async", "max_staleness": 2, "weight_update": "drain"},
    "partial rollouts": {"mode": "sync", "partial_rollouts": True},
}
COLUMNS = {
    "publish s": ("publish/seconds", "{:.3f}"),
    "stall s": ("publish/stall_s", "{:.3f}"),
    "generated tokens/s": ("tokens/generated_per_s", "{:,.0f}"),
    "rollouts crossed": ("staleness/rollouts_crossed", "{:.0%}"),
    "gap mean, nats": ("correction/logprob_gap_mean", "{:.4f}"),
    "gap max, nats": ("correction/logprob_gap_max", "{:.2f}"),
}


def train(runs_dir: Path, way: str, steps: int) -> list[dict[str, float]]:
    """The metrics of one run's steps, without the first ones."""
    name = way.replace(" ", "-")
    of = spec(runs_dir, "async", steps)
    of["name"] = name
    of["model"]["warm_start"] = None
    of["pipeline"] = {"groups_per_step": 16, **WAYS[way]}
    of["trainer"]["optimizer"]["learning_rate"] = 3.0e-4
    path = runs_dir / f"{name}.yaml"
    path.write_text(yaml.safe_dump(of))
    print(f"running {way}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "asyncrl_cli.cli.app", "train", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (metrics,) = runs_dir.glob(f"{name}-*/metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()][SKIPPED_STEPS:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=16, help="steps of each run")
    steps: int = parser.parse_args().steps
    print("| weights by | " + " | ".join(COLUMNS) + " |\n|" + "-|" * (len(COLUMNS) + 1))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        shutil.copy(Path(__file__).with_name("long_tail.py"), folder)
        for way in WAYS:
            rows = train(Path(folder), way, steps)
            cells = [form.format(median(row[name] for row in rows)) for name, form in COLUMNS.values()]
            print(f"| {way} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
