"""Test hosts, on machines where namespaces can be created."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Network, why_not
from tests.cluster.ray_cluster import RayCluster


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """A network for hosts with ``tmp_path`` as shared folder. Skips the test if it cannot be created."""
    if reason := why_not():
        pytest.skip(reason)
    with Network(tmp_path) as made:
        yield made


@pytest.fixture
def ray_cluster(network: Network) -> RayCluster:
    """A Ray cluster over the network, without a host yet."""
    return RayCluster(network)
