"""Runs over several hosts with separate processes and memory train the same bits as on one host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.events import Site
from tests.cluster.hosts import Network
from tests.cluster.runs import HostedRuns
from tests.e2e.conftest import Runs, rows
from tests.e2e.faults.verdict import differences

pytestmark = [pytest.mark.stack, pytest.mark.rotating]

TWO_AND_TWO: dict[str, Any] = {
    "trainer": {"ranks": 2, "zero_stage": 3},
    "rollout": {"engines": 2, "max_running_rollouts": 32},
}


def test_without_staleness_three_hosts_give_the_weights_of_one(network: Network, tmp_path: Path) -> None:
    """The head with rank 0, a host with rank 1, a host with two engines. No host reads another host's memory."""
    sections = {**TWO_AND_TWO, "pipeline": {"max_staleness": 0}, "stop": {"steps": 6}}
    alone = tmp_path / "alone"
    alone.mkdir()
    on_one = Runs(alone).train(**sections)
    site = Site.ready(network)
    spread = tmp_path / "spread"
    spread.mkdir()
    (spread / "models").symlink_to(alone / "models")
    runs = HostedRuns(spread, site.cluster)
    on_three = runs.train(**sections)
    assert differences(on_three, on_one) == []
    # The comparison means something only if the weights moved.
    assert any(row["publish/probe_change"] > 1e-3 for row in rows(on_three, "metrics.jsonl"))
    assert not site.head.processes_titled("ray::RolloutWorker")
