"""Disturbed runs for tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Runs
from tests.e2e.faults.disturbed import DisturbedRun

Disturb = Callable[..., DisturbedRun]


@pytest.fixture
def disturb(shared_runs: Runs) -> Iterator[Disturb]:
    """A function that starts a run of the base spec with some sections changed. Its driver ends with the test."""
    started: list[DisturbedRun] = []

    def start(steps: int, **sections: Any) -> DisturbedRun:
        spec = shared_runs.write_spec(stop={"steps": steps}, **sections)
        run = DisturbedRun(shared_runs, spec, steps, random.Random(0))
        started.append(run)
        run.start()
        return run

    yield start
    for run in started:
        run.end()
