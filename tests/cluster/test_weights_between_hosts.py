"""Weights between hosts that are killed, silent, disconnected or slow: only correct bytes may arrive."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.cluster.hosts import Command, Host, Network, until

pytestmark = [pytest.mark.slow, pytest.mark.rotating]

MIB = 40
LIMIT_S = 300
SLOW = 6 * 2**20
"""Bytes per second: the transfer takes long enough to be interrupted."""


class Weights:
    """Hosts with a replica each. The first ``holder`` writes the version."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.manifest = network.folder / "manifest"

    def holder(self, name: str) -> tuple[Host, str]:
        """A new host that has the version, and its URL."""
        host = self.network.host(name)
        command = host.start(*self._words("serve", host))
        return host, str(_wait(command, "url")["url"])

    def puller(self, name: str, *urls: str, timeout_s: int = LIMIT_S, attempts: int = 1) -> tuple[Host, Command]:
        """A new host that has begun to fetch the version from these URLs."""
        host = self.network.host(name)
        host.slow(SLOW)
        command = host.start(*self._words("pull", host), str(timeout_s), str(attempts), *urls)
        until(lambda: "begun" in command.printed(), "the pull")
        return host, command

    def _words(self, mode: str, host: Host) -> tuple[str, ...]:
        module = "tests.cluster.weights_host"
        return (sys.executable, "-m", module, mode, host.address, str(MIB), str(self.manifest))


@pytest.fixture
def weights(network: Network) -> Weights:
    return Weights(network)


def _lines(command: Command) -> list[dict[str, Any]]:
    return [json.loads(line) for line in command.printed().splitlines() if line.startswith("{")]


def _wait(command: Command, key: str) -> dict[str, Any]:
    """The first line with this key."""

    def found() -> dict[str, Any] | None:
        assert command.code is None, command.printed()
        return next((line for line in _lines(command) if key in line), None)

    return dict(until(found, f"{key} of {command.argv}", LIMIT_S))


def _moving(host: Host, mib: float) -> None:
    """Wait until a host has received this many MiB."""

    def received() -> bool:
        counters = host.run("cat", "/proc/net/dev").partition("eth0:")[2]
        return int(counters.split()[0]) > mib * 2**20

    until(received, f"{mib} MiB to arrive")


def test_a_host_gets_the_version_from_two_and_gives_it_to_the_next(weights: Weights) -> None:
    holders = [weights.holder("one")[1], weights.holder("two")[1]]
    host, command = weights.puller("three", *holders)
    pulled = _wait(command, "equal")
    assert pulled["equal"] and pulled["fetched"] == MIB * 2**20
    assert not pulled["faults"]
    for other in list(weights.network.hosts.values())[:2]:
        other.kill()
    host.fast()
    _, command = weights.puller("four", pulled["url"])
    assert _wait(command, "equal")["equal"]


@pytest.mark.parametrize("how", ["killed", "silent", "disconnected"])
def test_a_holder_that_is_lost_in_the_middle_is_named_and_another_sends_the_rest(weights: Weights, how: str) -> None:
    dying, dying_url = weights.holder("one")
    _, other_url = weights.holder("two")
    host, command = weights.puller("three", dying_url, other_url)
    _moving(host, 8)
    if how == "disconnected":
        dying.partition()
    else:
        dying.kill(silent=how == "silent")
    pulled = _wait(command, "equal")
    assert pulled["equal"]
    assert dying_url in pulled["faults"]


def test_a_host_that_was_disconnected_continues_where_it_was(weights: Weights) -> None:
    _, url = weights.holder("one")
    host, command = weights.puller("two", url, timeout_s=8, attempts=20)
    _moving(host, MIB / 2)  # more than the chunks that are under way at a time
    host.partition()
    failed = _wait(command, "failed")
    assert url in failed["failed"] and 0 < failed["held"] < MIB // 4
    host.heal()
    pulled = _wait(command, "equal")
    assert pulled["equal"]
    assert pulled["fetched"] < MIB * 2**20
