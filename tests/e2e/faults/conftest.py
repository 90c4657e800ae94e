"""Disturbed runs for tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import small_models
from tests.e2e.conftest import Runs
from tests.e2e.faults.disturbed import DisturbedRun

Disturb = Callable[..., DisturbedRun]
UNTRAINED: dict[str, Any] = {
    "model": small_models.UNTRAINED,
    "task": {"use": "spell_backward:AnyResponse"},
    "data": {"eval": {"size": 8}},
}
"""Random weights: responses have up to 40 random characters."""


@pytest.fixture
def disturb(shared_runs: Runs) -> Iterator[Disturb]:
    """A function that starts a run of the base spec and ``UNTRAINED``, with some sections changed. Its driver ends with
    the test."""
    started: list[DisturbedRun] = []

    def start(steps: int, run_class: type[DisturbedRun] = DisturbedRun, **sections: Any) -> DisturbedRun:
        spec = shared_runs.write_spec(**{"stop": {"steps": steps}} | UNTRAINED | sections)
        run = run_class(shared_runs, spec, steps, random.Random(0))
        started.append(run)
        run.start()
        return run

    yield start
    for run in started:
        run.end()
