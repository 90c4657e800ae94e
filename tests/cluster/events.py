"""The events of a campaign, and its hosts.

An event happens while a run trains. Some time later the damage is repaired, as if a machine were replaced or a network
repaired: otherwise a run could not continue after the loss of its only host with engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.cluster.hosts import Host, Network
from tests.cluster.ray_cluster import RayCluster
from tests.cluster.runs import HostedRun
from tests.e2e.faults.disturbed import Ended, Kill

PARTITION_S = 20.0
SLOW_BYTES_S = 5_000_000
ENGINE = "ray::RolloutWorker"
JOINS = "SELECT count(*) FROM engine_changes WHERE change = 'join'"


@dataclass(slots=True)
class Site:
    """The hosts of a run: ``head`` and ``second`` with a trainer rank each, ``engines`` with two engines, and
    ``guest``, which is on only while a third engine is wanted."""

    cluster: RayCluster
    head: Host
    second: Host
    engines: Host
    guest: Host

    @classmethod
    def ready(cls, network: Network) -> Site:
        """Turn the hosts on, and wait until Ray has the first three."""
        cluster = RayCluster(network)
        site = cls(cluster, *(network.host(name) for name in ("head", "second", "engines", "guest")))
        site.guest.kill()
        for host in (site.head, site.second, site.engines):
            site.join(host)
        cluster.wait_for(site.head, site.second, site.engines)
        return site

    def join(self, host: Host) -> None:
        """Start Ray on a host, with its role's CPUs and labels."""
        self.cluster.start(
            host,
            cpus=2 if host is self.engines else 1,
            labels={"role": "trainer" if host in (self.head, self.second) else "rollout"},
        )

    def restore(self) -> None:
        """Repair the network, replace hosts that are off, and start Ray where it has ended, like an operator.

        After a long partition Ray declares the host dead, and the host's Ray node ends.
        """
        for host in (self.head, self.second, self.engines, self.guest):
            if host.alive:
                host.heal()
                host.fast()
            elif host is not self.guest:
                host.boot()
            if host.alive and self.cluster.ended(host):
                self.join(host)

    def inject(self, run: HostedRun, name: str) -> bool:
        """Cause an event while a run trains. Returns False if the run was complete before.

        If the driver ends with an error, this is noted, and the run is resumed.
        """
        while True:
            try:
                self._settled(run, 3)
                run.pause(run.random.uniform(0, 2))
                if run.trained() >= run.steps:
                    return False
                PREPARED.get(name, _nothing)(self, run)
                run.evidence.take_snapshot(run.journal)
                run.kills.append(Kill(name, "", time.time(), run.trained()))
                run.say(f"    {name}, at step {run.trained()}")
                EVENTS[name](self, run)
            except Ended:
                if run.code == 0:
                    return bool(run.kills) and run.kills[-1].part == name
                run.note_stop()
                self.restore()
                run.resume()
                if run.kills and run.kills[-1].part == name:
                    return True
            else:
                self.restore()
                run.evidence.take_snapshot(run.journal)
                return True

    def _settled(self, run: HostedRun, steps: int) -> None:
        wanted = min(run.trained() + steps, run.steps)
        run.until(lambda: run.trained() >= wanted, f"step {wanted}")


def _nothing(site: Site, run: HostedRun) -> None:
    pass


def _guest_is_off(site: Site, run: HostedRun) -> None:
    if site.guest.alive:
        site.guest.kill()
        run.pause(10)


def _engines_killed(site: Site, run: HostedRun) -> None:
    site.engines.kill()
    run.pause(run.random.uniform(0, 10))


def _engines_without_power(site: Site, run: HostedRun) -> None:
    site.engines.kill(silent=True)
    run.pause(run.random.uniform(0, 10))


def _engines_partitioned(site: Site, run: HostedRun) -> None:
    site.engines.partition()
    run.pause(PARTITION_S)
    site.engines.heal()
    # Ray's node ends when it learns that the head declared it dead, unless the partition ended before.
    run.pause(10)


def _engines_slow(site: Site, run: HostedRun) -> None:
    site.engines.slow(SLOW_BYTES_S)
    wanted = min(run.trained() + 5, run.steps)
    run.until(lambda: run.trained() >= wanted, f"step {wanted} on a slow network")


def _engine_added(site: Site, run: HostedRun) -> None:
    joined = run.ask(JOINS)
    site.guest.boot()
    site.join(site.guest)
    run.until(lambda: site.guest.processes_titled(ENGINE), "an engine on the host that was added")
    run.until(lambda: run.ask(JOINS) > joined, "that engine to serve")


def _trainer_killed(site: Site, run: HostedRun) -> None:
    site.second.kill()
    run.pause(run.random.uniform(0, 10))


EVENTS: dict[str, Callable[[Site, HostedRun], None]] = {
    "engines killed": _engines_killed,
    "engines without power": _engines_without_power,
    "engines partitioned": _engines_partitioned,
    "engines at 5 MB/s": _engines_slow,
    "engine added": _engine_added,
    "trainer killed": _trainer_killed,
}
PREPARED: dict[str, Callable[[Site, HostedRun], None]] = {"engine added": _guest_is_off}
ALL = tuple(EVENTS)
WITHOUT_EFFECT = ("engines killed", "engines without power", "engines at 5 MB/s", "engine added", "trainer killed")
"""Events that do not change the result of a run without staleness. Unfinished rollouts' tokens are not recorded, so
these rollouts are generated again with the same random numbers. After a partition an engine hands over its tokens, and
another engine continues them with other random numbers (docs/decisions/0010-segments.md)."""
