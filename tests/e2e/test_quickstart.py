"""The main job of the README: what it learns. It has the machine to itself (Makefile), as it takes minutes."""

from __future__ import annotations

import pytest

from .conftest import ROOT, Runs, rows

pytestmark = pytest.mark.stack

STEPS = 80
"""Of the spec's 140: runs reward nine of ten sampled responses from step 70 on, and half of them in the first ten."""


@pytest.mark.slow
def test_the_quickstart_learns(shared_runs: Runs) -> None:
    spec = ROOT / "specs/quickstart.yaml"
    # Nothing is asserted of the evaluations between the first step and the last.
    changes = (f"runs_dir={shared_runs.folder}", f"stop.steps={STEPS}", f"evaluation.every={STEPS}")
    ended = shared_runs.run("train", spec, *(word for change in changes for word in ("--set", change)))
    assert ended.code == 0, ended.out + ended.err + shared_runs.logs()
    run = shared_runs.newest()
    last = rows(run, "metrics.jsonl")[-1]["step"]
    accuracy = {
        (kind, when): rows(run, f"evaluations/step-{step:06d}-{kind}.jsonl")[0]
        for kind in ("greedy", "sampled")
        for when, step in (("before", 0), ("after", last))
    }
    assert accuracy["greedy", "before"]["accuracy"] < 0.25
    assert accuracy["greedy", "after"]["accuracy"] >= 0.95
    assert accuracy["sampled", "before"]["accuracy"] < 0.35
    assert accuracy["sampled", "after"]["accuracy"] >= 0.85
    assert accuracy["greedy", "after"]["mean_length"] > 2 * accuracy["greedy", "before"]["mean_length"]
