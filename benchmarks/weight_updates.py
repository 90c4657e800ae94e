"""The cost of the ways to replace an engine's weights, and their effect on log-probs.

    python benchmarks/weight_updates.py [--steps N]

The same spec in `async` with `keep`, `recompute` and `drain`, and in `sync` with partial rollouts (abort and continue).
The model has random weights, so the lengths of its responses have a geometric distribution, and most rollouts have
tokens of several versions. The learning rate is large enough for old keys and values to matter. The spec is the one in
async_vs_sync.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from async_vs_sync import SKIPPED_STEPS, run_of, spec
from common import header, metrics, row

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
    of = spec(runs_dir, "async", steps)
    of["name"] = way.replace(" ", "-")
    del of["model"]["warm_start"]
    of["pipeline"] = {"groups_per_step": 16, **WAYS[way]}
    of["trainer"]["optimizer"]["learning_rate"] = 3.0e-4
    print(f"running {way}", file=sys.stderr, flush=True)
    return metrics(run_of(runs_dir, of))[SKIPPED_STEPS:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=16, help="steps of each run")
    steps: int = parser.parse_args().steps
    print(header("weights by", *COLUMNS))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for way in WAYS:
            found = train(Path(folder), way, steps)
            cells = [form.format(median(step[name] for step in found)) for name, form in COLUMNS.values()]
            print(row(way, *cells), flush=True)


if __name__ == "__main__":
    main()
