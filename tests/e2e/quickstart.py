"""The main example of the README, and what a run of it must have learned."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import ROOT, Runs, rows

STEPS = 30
"""Half as many as the spec has. About nine of ten sampled responses are correct by then."""


def train_quickstart(runs: Runs, *changes: str, limit_s: float) -> Path:
    """Train it with these ``--set`` arguments for ``STEPS`` steps; returns the run's folder."""
    # No assertion needs the evaluations between the first step and the last.
    words = (f"runs_dir={runs.folder}", f"stop.steps={STEPS}", f"evaluation.every={STEPS}", *changes)
    spec = ROOT / "specs/quickstart.yaml"
    ended = runs.run("train", spec, *(word for change in words for word in ("--set", change)), limit_s=limit_s)
    assert ended.code == 0, ended.out + ended.err + runs.logs()
    return runs.newest()


def assert_learned(run: Path) -> None:
    """Most sampled responses are correct, and the model explains its steps, which it did not do before."""
    last = rows(run, "metrics.jsonl")[-1]["step"]
    accuracy = {
        (kind, when): rows(run, f"evaluations/step-{step:06d}-{kind}.jsonl")[0]
        for kind in ("greedy", "sampled")
        for when, step in (("before", 0), ("after", last))
    }
    assert accuracy["greedy", "before"]["accuracy"] < 0.4
    assert accuracy["greedy", "after"]["accuracy"] >= 0.9
    assert accuracy["sampled", "before"]["accuracy"] < 0.35
    assert accuracy["sampled", "after"]["accuracy"] >= 0.75
    assert accuracy["greedy", "after"]["mean_length"] > 2 * accuracy["greedy", "before"]["mean_length"]
