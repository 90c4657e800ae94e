"""The efficiency of `async`: its throughput divided by the slower side's throughput alone on the same cores.

    python benchmarks/efficiency.py [--steps N]

Three measurements on the same cores: a run in mode `async` (with the spec of async_vs_sync.py); training alone, which
is a replay of that run's steps with the checksum of each version; generation alone, which is a run of one large step,
until its last group is admitted. All of them count response tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import async_vs_sync
from common import ASYNCRL, header, metrics, row

from asyncrl_cli.journal.events import events
from asyncrl_cli.journal.queries import snapshot
from asyncrl_cli.journal.schema import FILE

WARM = 0.25
"""The part of a measurement that is not timed: caches warm up, and the first responses to end are short."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of the run")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        run = async_vs_sync.train(Path(folder), "async", steps, 1)
        together = async_vs_sync.measure(run)
        training = training_alone(run)
        generation = generation_alone(Path(folder), steps)
    slower = min(training, generation)
    print(header("", "response tokens/s", "trainer busy", "engine busy"))
    print(row("training alone", f"{training:,.0f}", "", ""))
    print(row("generation alone", f"{generation:,.0f}", "", ""))
    rate, busy = together["trained tokens/s"], [f"{together[f'{side} busy']:.0%}" for side in ("trainer", "engine")]
    print(row("async", f"{rate:,.0f}", *busy))
    print(f"\nefficiency {rate / slower:.2f}: async over {'training' if slower == training else 'generation'} alone")


def training_alone(run: Path) -> float:
    """Trained tokens per second of a replay, with training and the checksum of each version."""
    tokens = [row["tokens/trained"] for row in metrics(run)]
    print("replaying", file=sys.stderr, flush=True)
    command = [*ASYNCRL, "replay", str(run), "--json"]
    ended = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "step" in json.loads(line):
                ended.append(time.monotonic())
    if process.returncode or len(ended) != len(tokens):
        raise SystemExit(f"the replay ended with {process.returncode} after {len(ended)} of {len(tokens)} steps")
    first = int(WARM * len(ended))
    return float(sum(tokens[first + 1 :])) / (ended[-1] - ended[first])


def generation_alone(folder: Path, steps: int) -> float:
    """Generated tokens per second of a run that trains once, after all its groups."""
    settings: dict[str, Any] = async_vs_sync.spec(folder, "async", 1)
    settings["pipeline"]["groups_per_step"] *= steps
    print("generating", file=sys.stderr, flush=True)
    with snapshot(async_vs_sync.run_of(folder, settings) / FILE) as connection:
        known = list(events(connection, ("admit", "finish")))
    last_admission = max(event.at for event in known if event.name == "admit")
    finished = sorted((event.at, int(event.facts["tokens"])) for event in known if event.name == "finish")
    full = [(at, tokens) for at, tokens in finished if at <= last_admission]
    sums = list(accumulate(tokens for _, tokens in full))
    first = int(WARM * len(full))
    return (sums[-1] - sums[first]) / (full[-1][0] - full[first][0])


if __name__ == "__main__":
    main()
