"""The effect of staleness on learning: the quickstart at bounds S = 0 to 16, with and without importance weights.

    python benchmarks/staleness.py [--quick] [--bounds S ...] [--corrections PRESET ...] [--seeds N] [--steps N]
        [--plot docs/staleness.svg]

Every run trains the quickstart's task for the same number of steps from the same warm-started model of its seed, and
is evaluated on all held-out prompts. At S = 0 all weights are 1, so it is run once. `--quick` runs S = 0 and S = 4
for 40 steps. One run takes two to four minutes on two cores, S = 0 the longest, because nothing overlaps; the table is
printed again after every run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from common import QUICKSTART, header, metrics, overrides, row, run_spec

from asyncrl_cli.runs.directory import RunDirectory

BOUNDS = (0, 1, 2, 4, 8, 16)
CORRECTIONS = ("truncated", "decoupled")
"""Presets of `algorithm.correction`: weights truncated at 2, and none."""
SMOOTHED = 10
"""The number of steps over which a point of the plot is averaged."""


@dataclass(frozen=True, slots=True)
class Result:
    """One run's metrics, step by step, and its accuracy at the end."""

    steps: list[dict[str, float]]
    greedy: float
    sampled: float

    @property
    def seconds(self) -> float:
        """The time from the end of the first step to the end of the last, without start-up."""
        return self.steps[-1]["time"] - self.steps[0]["time"]


def train(runs_dir: Path, bound: int, correction: str, seed: int, steps: int) -> Result:
    """One run."""
    name = f"s{bound}-{correction}-{seed}"
    changes = (
        f"name={name}",
        f"runs_dir={runs_dir}",
        f"seed={seed}",
        f"stop.steps={steps}",
        f"pipeline.max_staleness={bound}",
        f"algorithm.correction.preset={correction}",
        "evaluation.every=0",
        "tracking.mlflow=false",
    )
    print(f"running {name}", file=sys.stderr, flush=True)
    run_spec(QUICKSTART, *overrides(changes))
    (folder,) = runs_dir.glob(f"{name}-*")
    accuracy = RunDirectory(folder).state.accuracy
    return Result(metrics(folder), accuracy["greedy"], accuracy["sampled"])


def table(results: dict[tuple[int, str], list[Result]]) -> str:
    """A row for each bound and correction: means over seeds, and the smallest and largest accuracy."""
    names = ("S", "correction", "greedy", "sampled", "staleness, mean and most", "trained tokens", "s", "runs")
    lines = [header(*names)]
    for (bound, correction), runs in results.items():
        steps = [step for run in runs for step in run.steps]
        cells = (
            str(bound),
            correction,
            spread([run.greedy for run in runs]),
            spread([run.sampled for run in runs]),
            f"{mean(step['staleness/groups_mean'] for step in steps):.1f}, "
            f"{max(step['staleness/groups_max'] for step in steps):.0f}",
            f"{mean(sum(step['tokens/trained'] for step in run.steps) for run in runs):,.0f}",
            f"{mean(run.seconds for run in runs):.0f}",
            str(len(runs)),
        )
        lines.append(row(*cells))
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """Mean, and the range if there is one."""
    text = f"{mean(values):.3f}"
    return text if len(values) == 1 else f"{text} ({min(values):.3f} to {max(values):.3f})"


def plot(results: dict[tuple[int, str], list[Result]], path: Path) -> None:
    """Training accuracy of the first seed, against trained tokens and against time; solid lines are corrected."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, (by_tokens, by_time) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    bounds = sorted({bound for bound, _ in results})
    colours = {bound: plt.get_cmap("viridis")(index / len(bounds)) for index, bound in enumerate(bounds)}
    for (bound, correction), runs in results.items():
        rows = runs[0].steps
        accuracy = [
            mean(row["reward/correct"] for row in rows[max(0, at + 1 - SMOOTHED) : at + 1]) for at in range(len(rows))
        ]
        tokens = [sum(row["tokens/trained"] for row in rows[: at + 1]) for at in range(len(rows))]
        style: dict[str, Any] = {
            "color": colours[bound],
            "linestyle": "-" if correction == CORRECTIONS[0] else ":",
            "label": f"S = {bound}, {correction}",
        }
        by_tokens.plot(tokens, accuracy, **style)
        by_time.plot([row["time"] - rows[0]["time"] for row in rows], accuracy, **style)
    by_tokens.set(xlabel="trained tokens", ylabel=f"accuracy in training, mean of {SMOOTHED} steps")
    by_time.set(xlabel="seconds since the first step")
    by_tokens.legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="S = 0 and 4, 40 steps, one seed")
    parser.add_argument("--bounds", type=int, nargs="+", default=BOUNDS, help="bounds of staleness to run")
    parser.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=CORRECTIONS, help="presets to run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each setting")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run")
    parser.add_argument("--plot", type=Path, help="write a plot there")
    arguments = parser.parse_args()
    bounds, seeds, steps = ((0, 4), 1, 40) if arguments.quick else (arguments.bounds, arguments.seeds, arguments.steps)
    results: defaultdict[tuple[int, str], list[Result]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for seed in range(seeds):
            for bound in bounds:
                for correction in arguments.corrections if bound else CORRECTIONS[:1]:
                    results[bound, correction].append(train(Path(folder), bound, correction, seed, steps))
                    print(table(results), file=sys.stderr, flush=True)
                    if arguments.plot:
                        plot(results, arguments.plot)
    print(table(results))


if __name__ == "__main__":
    main()
