"""The agent as in a run: a Ray actor that the driver calls, with ranks and engines in other processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.weights.agent import HostAgent
from asyncrl_cli.weights.manifest import Endpoint, Manifest, Pulled, Superseded
from tests.weights.holders import CHUNKS, RANKS, SLOTS, TOKEN, content, manifest

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


class Agents:
    """Agents by name, each with its endpoint. All are on this host, which is enough for the driver's calls."""

    def __init__(self, ray: Any, folder: Path) -> None:
        self.ray = ray
        self.folder = folder
        self.started: dict[str, tuple[Any, Endpoint]] = {}
        self.version = 0
        self.manifest: Manifest | None = None

    def __call__(self, *names: str) -> list[tuple[Any, Endpoint]]:
        """The agents with these names; those that do not live start together."""
        new = [name for name in names if name not in self.started]
        agent = self.ray.remote(HostAgent).options(num_cpus=0)
        actors = {name: agent.remote(name, str(self.folder)) for name in new}
        starts = [actor.start.remote(SLOTS, RANKS, TOKEN, "127.0.0.1") for actor in actors.values()]
        for (name, actor), endpoint in zip(actors.items(), self.ray.get(starts, timeout=120), strict=True):
            # The test's hosts are one Ray node; their names tell them apart.
            self.started[name] = actor, Endpoint(name, endpoint.url)
        return [self.started[name] for name in names]

    def publish(self, actor: Any) -> Manifest:
        """The next version, on the host of ``actor``."""
        self.version += 1
        path = self.ray.get(actor.begin.remote(self.version, self.manifest, range(RANKS)))
        write(path, self.version)
        digests = self.ray.get(actor.digest.remote(self.version, list(range(RANKS))))
        self.manifest = Manifest.from_digests(self.version, SLOTS, RANKS, [digests])
        return self.manifest


def write(path: str, version: int) -> None:
    descriptor = os.open(path, os.O_RDWR)
    os.pwrite(descriptor, content(version), 0)
    os.close(descriptor)


@pytest.fixture(scope="module")
def agents(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Agents:
    """Three agents that all tests share: an actor takes seconds to start."""
    agents = Agents(ray, tmp_path_factory.mktemp("agents"))
    agents("trainer", "engine", "later")
    return agents


def test_a_fetch_continues_for_the_next_caller_when_its_caller_gives_up(agents: Agents) -> None:
    (trainer, trainers), (engine, _) = agents("trainer", "engine")
    version = agents.publish(trainer)

    async def cancelled_caller() -> Pulled:
        call = asyncio.ensure_future(engine.pull.remote(version, [trainers], 60.0))
        await asyncio.sleep(0)
        call.cancel()
        return await engine.pull.remote(version, [], 60.0)  # without holders: it can only wait for the other fetch

    assert asyncio.run(cancelled_caller()).path


def test_calls_for_one_version_share_a_fetch_and_a_newer_one_ends_it(agents: Agents) -> None:
    (trainer, trainers), (engine, _) = agents("trainer", "engine")
    get = agents.ray.get
    nowhere = Endpoint("nowhere", "http://127.0.0.1:9")
    older = agents.publish(trainer)
    waiting = [engine.pull.remote(older, [nowhere], 60.0) for _ in range(2)]
    newer = engine.pull.remote(agents.publish(trainer), [trainers], 60.0)
    assert get(newer).fetched_bytes > 0
    for call in waiting:
        with pytest.raises(Superseded, match=f"pull of weight version {older.version} cancelled"):
            get(call)


def test_a_version_goes_from_a_trainers_host_to_an_engines_host_and_on(agents: Agents) -> None:
    (trainer, trainers), (engine, engines), (later, _) = agents("trainer", "engine", "later")
    get = agents.ray.get
    for _ in range(3):
        last = agents.publish(trainer)
        assert last == manifest(last.version)
        here = get(trainer.pull.remote(last, [], 0.0))
        assert here.fetched_bytes == 0, "a host with all ranks fetches nothing"
        pulled: Pulled = get(engine.pull.remote(last, [trainers, engines], 60.0))
        assert pulled.fetched_bytes == sum(chunk.nbytes for chunk in CHUNKS)
        for found in (here, pulled):
            memory = Path(found.path).read_bytes()
            slot = SLOTS[0]
            assert memory[: slot.nbytes] == content(last.version)[: slot.nbytes]
    assert get(engine.report.remote()) == {version: len(CHUNKS) for version in (last.version - 1, last.version)}
    agents.ray.kill(agents.started.pop("trainer")[0])
    joined: Pulled = get(later.pull.remote(last, [trainers, engines], 60.0))
    assert joined.faults.keys() <= {trainers.node_id}
    assert TOKEN not in "".join(path.read_text() for path in agents.folder.iterdir())


def test_a_killed_agent_leaves_nothing(agents: Agents) -> None:
    (killed, url), (other, _) = agents("engine", "later")
    path = Path(agents.ray.get(killed.begin.remote(100, None, range(RANKS))))
    assert path.exists()
    with pytest.raises(RunError, match="weight version 107 is not being written"):
        agents.ray.get(killed.digest.remote(107, [0]))
    del agents.started["engine"]
    os.kill(int(path.parts[2]), signal.SIGKILL)
    with pytest.raises(agents.ray.exceptions.RayActorError):
        agents.ray.get(killed.report.remote())
    assert not os.path.exists(path)  # Path.exists raises for the files of dead processes and of other users
    assert not list(Path("/dev/shm").glob("*asyncrl*"))
    with pytest.raises(RunError, match="Connection refused"):
        agents.ray.get(other.pull.remote(manifest(101), [url], 1.0))
