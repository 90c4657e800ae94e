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
    """Agents of one test. All are on this host, which is enough for the driver's calls."""

    def __init__(self, ray: Any, folder: Path) -> None:
        self.ray = ray
        self.folder = folder
        self.actors: list[Any] = []

    def start(self) -> tuple[Any, Endpoint]:
        actor = self.ray.remote(HostAgent).options(num_cpus=0).remote(f"agent-{len(self.actors)}", str(self.folder))
        self.actors.append(actor)
        endpoint = self.ray.get(actor.start.remote(SLOTS, RANKS, TOKEN, "127.0.0.1"), timeout=120)
        # The test's hosts are one Ray node; their names tell them apart.
        return actor, Endpoint(f"host-{len(self.actors)}", endpoint.url)

    def publish(self, actor: Any, version: int, keep: Manifest | None = None) -> Manifest:
        path = self.ray.get(actor.begin.remote(version, keep, range(RANKS)))
        write(path, version)
        return Manifest.of(version, SLOTS, RANKS, [self.ray.get(actor.digest.remote(version, list(range(RANKS))))])


def write(path: str, version: int) -> None:
    descriptor = os.open(path, os.O_RDWR)
    os.pwrite(descriptor, content(version), 0)
    os.close(descriptor)


@pytest.fixture
def agents(ray: Any, tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(ray, tmp_path)
    yield agents
    for actor in agents.actors:
        ray.kill(actor)


def test_a_version_goes_from_a_trainers_host_to_an_engines_host_and_on(agents: Agents) -> None:
    trainer, trainers = agents.start()
    engine, engines = agents.start()
    later, _ = agents.start()
    get = agents.ray.get
    last: Manifest | None = None
    for version in (1, 2, 3):
        last = agents.publish(trainer, version, last)
        assert last == manifest(version)
        here = get(trainer.pull.remote(last, [], 0.0))
        assert here.fetched_bytes == 0, "a host with all ranks fetches nothing"
        pulled: Pulled = get(engine.pull.remote(last, [trainers, engines], 60.0))
        assert pulled.fetched_bytes == sum(chunk.nbytes for chunk in CHUNKS)
        for found in (here, pulled):
            memory = Path(found.path).read_bytes()
            slot = SLOTS[0]
            assert memory[: slot.nbytes] == content(version)[: slot.nbytes]
    assert get(engine.report.remote()) == {2: len(CHUNKS), 3: len(CHUNKS)}
    agents.ray.kill(trainer)
    assert last is not None
    joined: Pulled = get(later.pull.remote(last, [trainers, engines], 60.0))
    assert joined.faults.keys() <= {trainers.node_id}
    assert TOKEN not in "".join(path.read_text() for path in agents.folder.iterdir())


def test_calls_for_one_version_share_a_fetch_and_a_newer_one_ends_it(agents: Agents) -> None:
    trainer, trainers = agents.start()
    engine, _ = agents.start()
    get = agents.ray.get
    nowhere = Endpoint("nowhere", "http://127.0.0.1:9")
    first = agents.publish(trainer, 1)
    waiting = [engine.pull.remote(first, [nowhere], 60.0) for _ in range(2)]
    newer = engine.pull.remote(agents.publish(trainer, 2, first), [trainers], 60.0)
    assert get(newer).fetched_bytes > 0
    for call in waiting:
        with pytest.raises(Superseded, match="pull of weight version 1 cancelled"):
            get(call)


def test_a_fetch_continues_for_the_next_caller_when_its_caller_gives_up(agents: Agents) -> None:
    trainer, trainers = agents.start()
    engine, _ = agents.start()
    first = agents.publish(trainer, 1)

    async def cancelled_caller() -> Pulled:
        call = asyncio.ensure_future(engine.pull.remote(first, [trainers], 60.0))
        await asyncio.sleep(0)
        call.cancel()
        return await engine.pull.remote(first, [], 60.0)  # without holders: it can only wait for the other fetch

    assert asyncio.run(cancelled_caller()).path


def test_a_killed_agent_leaves_nothing(agents: Agents) -> None:
    trainer, trainers = agents.start()
    path = Path(agents.ray.get(trainer.begin.remote(1, None, range(RANKS))))
    assert path.exists()
    with pytest.raises(RunError, match="weight version 7 is not being written"):
        agents.ray.get(trainer.digest.remote(7, [0]))
    os.kill(int(path.parts[2]), signal.SIGKILL)
    with pytest.raises(agents.ray.exceptions.RayActorError):
        agents.ray.get(trainer.report.remote())
    assert not os.path.exists(path)  # Path.exists raises for the files of dead processes and of other users
    assert not list(Path("/dev/shm").glob("*asyncrl*"))
    engine, _ = agents.start()
    with pytest.raises(RunError, match="Connection refused"):
        agents.ray.get(engine.pull.remote(manifest(1), [trainers], 1.0))
