"""The events of a campaign, and its hosts.

An event happens while a run trains. Some time later the damage is repaired, as if a machine were replaced or a network
repaired: otherwise a run could not continue after the loss of its only host with engines.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from tests.cluster.hosts import Host, Network
from tests.cluster.ray_cluster import RayCluster
from tests.cluster.runs import HostedRun
from tests.e2e.faults.disturbed import Ended, Kill

PARTITION_S = 20.0
SLOW_BYTES_S = 5_000_000
FULL_S = 20.0
CRAWL_S = 30.0
ENGINE = "ray::RolloutWorker"
JOINS = "SELECT count(*) FROM engine_changes WHERE change = 'join'"


@dataclass(slots=True)
class Site:
    """The hosts of a run: ``head`` and ``second`` with a trainer rank each, ``engine_hosts`` with one engine each, or
    with two if there is one such host, and ``guest``, which is on only while a further engine is wanted."""

    cluster: RayCluster
    head: Host
    second: Host
    engine_hosts: list[Host]
    guest: Host

    @classmethod
    def ready(cls, network: Network, engine_hosts: int = 1) -> Site:
        """Turn the hosts on, and wait until Ray has all but the guest."""
        cluster = RayCluster(network)
        head, second = network.host("head"), network.host("second")
        engines = [network.host(f"engines{index}") for index in range(engine_hosts)]
        site = cls(cluster, head, second, engines, network.host("guest"))
        site.guest.kill()
        for host in (head, second, *engines):
            site.join(host)
        cluster.wait_for(head, second, *engines)
        return site

    def join(self, host: Host) -> None:
        """Start Ray on a host, with its role's CPUs and labels."""
        self.cluster.start(
            host,
            cpus=2 if [host] == self.engine_hosts else 1,
            labels={"role": "trainer" if host in (self.head, self.second) else "rollout"},
        )

    def restore(self) -> None:
        """Repair networks and disks, replace hosts that are off, and start Ray where it has ended, like an operator.

        After a long partition Ray declares the host dead, and the host's Ray node ends.
        """
        for host in (self.head, self.second, *self.engine_hosts, self.guest):
            if host.alive:
                host.heal()
                host.fast()
                host.free_disk()
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
    run.random.choice(site.engine_hosts).kill()
    run.pause(run.random.uniform(0, 10))


def _engines_without_power(site: Site, run: HostedRun) -> None:
    run.random.choice(site.engine_hosts).kill(silent=True)
    run.pause(run.random.uniform(0, 10))


def _engines_partitioned(site: Site, run: HostedRun) -> None:
    host = run.random.choice(site.engine_hosts)
    host.partition()
    run.pause(PARTITION_S)
    host.heal()
    # Ray's node ends when it learns that the head declared it dead, unless the partition ended before.
    run.pause(10)


def _engines_slow(site: Site, run: HostedRun) -> None:
    run.random.choice(site.engine_hosts).slow(SLOW_BYTES_S)
    wanted = min(run.trained() + 5, run.steps)
    run.until(lambda: run.trained() >= wanted, f"step {wanted} on a slow network")


def _engines_disk_full(site: Site, run: HostedRun) -> None:
    """An engine is killed while the disk is full, so its replacement cannot write a log."""
    host = run.random.choice(site.engine_hosts)
    host.fill_disk()
    for pid in run.until(lambda: host.processes_titled(ENGINE), "an engine")[:1]:
        os.kill(pid, signal.SIGKILL)
    run.pause(FULL_S)


def _trainer_disk_full(site: Site, run: HostedRun) -> None:
    site.second.fill_disk()
    run.pause(FULL_S)


def _engines_crawl(site: Site, run: HostedRun) -> None:
    _crawl(site, run.random.choice(site.engine_hosts), run)


def _trainer_crawls(site: Site, run: HostedRun) -> None:
    _crawl(site, site.second, run)


def _crawl(site: Site, host: Host, run: HostedRun) -> None:
    """The processes of a host stand still nine tenths of the time, as if it swapped."""
    entered = site.cluster.commands[host.name].process.pid  # nsenter stops itself when its command is stopped
    deadline = time.monotonic() + CRAWL_S
    while time.monotonic() < deadline:
        pids = [pid for pid in host.processes() if pid != host.pid]
        try:
            _signal(pids, signal.SIGSTOP)
            run.pause(0.9)
        finally:
            _signal([entered, *pids], signal.SIGCONT)
        run.pause(0.1)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


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
    "engines' disk full": _engines_disk_full,
    "engines crawl": _engines_crawl,
    "engine added": _engine_added,
    "trainer killed": _trainer_killed,
    "trainer's disk full": _trainer_disk_full,
    "trainer crawls": _trainer_crawls,
}
PREPARED: dict[str, Callable[[Site, HostedRun], None]] = {"engine added": _guest_is_off}
ALL = tuple(EVENTS)
WITHOUT_EFFECT = ("engines killed", "engines without power", "engines at 5 MB/s", "engine added", "trainer killed")
"""Events that do not change the result of a run without staleness. Unfinished rollouts' tokens are not recorded, so
these rollouts are generated again with the same random numbers. After a partition an engine hands over its tokens, and
another engine continues them with other random numbers (docs/decisions/0010-segments.md)."""
