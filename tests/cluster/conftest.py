"""Test hosts, on machines where namespaces can be created."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Network, why_not
from tests.cluster.ray_cluster import RayCluster


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """A network for hosts; ``tmp_path`` is their shared folder. Tests are skipped where it cannot be created."""
    if reason := why_not():
        pytest.skip(reason)
    with Network(tmp_path) as made:
        yield made


@pytest.fixture
def ray_cluster(network: Network) -> RayCluster:
    """A Ray cluster over the network, still without a host."""
    return RayCluster(network)
