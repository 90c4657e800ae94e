"""Engines and trainer start in parallel. Actors that die are started again, and failures are named."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stand_in_hosts import StandInHosts
from stand_ins import Actor, Notes, ReadyGroup, remote

from asyncrl_cli.core.errors import ConfigError, UserError
from asyncrl_cli.orchestrator.actors import start_all
from asyncrl_cli.orchestrator.engines import EngineProcess
from asyncrl_cli.orchestrator.trainers import TrainerLost
from asyncrl_cli.records.training import RankLocation
from asyncrl_cli.system import supervised_actor
from asyncrl_cli.system.supervised_actor import RestartBudget


class EngineActor(Actor):
    """``fate`` is called at the actor's start, and may kill it or raise an error."""

    def __init__(self, name: str, pid: int, fate: Callable[[EngineActor], None]) -> None:
        super().__init__()
        self.name = name
        self.pid = pid
        self.node = "node-0"
        self.started_on = ""
        self.cache_bytes: int | None = None
        self._fate = fate

    @remote
    async def preload(self) -> int:
        return self.pid

    @remote
    async def start(self, model_dir: str, version: int | None, cache_bytes: int | None) -> tuple[str, int]:
        self._fate(self)
        await asyncio.sleep(0)
        self.started_on, self.cache_bytes = model_dir, cache_bytes
        return self.node, cache_bytes or self.pid


class Factory:
    """Creates engines' actors, with the process ids 1001, 1002, ..."""

    def __init__(self, fate: Callable[[EngineActor], None] = lambda actor: None, address: str | None = None) -> None:
        self.spec = SimpleNamespace(
            cluster=SimpleNamespace(address=address),
            rollout=SimpleNamespace(threads_per_engine=1, gpus_per_engine=0),
        )
        self.made: list[EngineActor] = []
        self._fate = fate

    def engine(self, name: str) -> EngineActor:
        self.made.append(EngineActor(name, 1001 + len(self.made), self._fate))
        return self.made[-1]

    def process(self, name: str, budget: RestartBudget) -> EngineProcess:
        spec: Any = self.spec
        make, folder = partial(self.engine, name), asyncio.sleep(0, Path("/model_stub"))
        return EngineProcess(spec, name, make, folder=folder, budget=budget, group=ReadyGroup(name))


class Trainers:
    """Trainer ranks that die in the calls ``dies_at``, one after another."""

    def __init__(self, *dies_at: str) -> None:
        self.locations: tuple[RankLocation, ...] = ()
        self.calls: list[str] = []
        self._dies_at = list(dies_at)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(location.node_id for location in self.locations)

    async def preload(self) -> None:
        self._note("preload")
        self.locations = (RankLocation("node-0", "10.0.0.1"),)

    async def prepare_model(self) -> str:
        self._note("prepare_model")
        return "/models/one"

    async def start(self, checkpoint: Path | None) -> None:
        self._note(f"start {checkpoint}")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self._dies_at and call.startswith(self._dies_at[0]):
            raise TrainerLost("trainer-0", f"died at {self._dies_at.pop(0)}")


@pytest.fixture
def killed(killed: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The killed processes and actors."""
    monkeypatch.setattr(supervised_actor.os, "kill", lambda pid, number: killed.append((pid, number)))
    return killed


async def started(
    factory: Factory, trainers: Trainers, notes: Notes | None = None, shared_gpus: bool = False
) -> tuple[str, Notes, list[str]]:
    """Start the actors; returns the model's folder, the recorded faults, and the displayed messages."""
    faults, messages = Notes() if notes is None else notes, list[str]()
    budget = faults.budget()
    hosts = StandInHosts(budget)
    processes = [factory.process(f"engine-{index}", budget) for index in range(2)]
    model = await start_all(
        processes,
        trainers,  # type: ignore[arg-type]
        hosts.replicas,
        checkpoint=Path("/step-000004"),
        progress=messages.append,
        budget=budget,
        initial=(initial := asyncio.get_running_loop().create_future()),
        shared_gpus=shared_gpus,
    )
    assert all(process.actor.started_on == "/model_stub" for process in processes)
    assert initial.result() == Path(model)
    assert list(hosts.agents) == ["node-0"], "one agent for the host of the ranks, whatever died"
    return model, faults, messages


def once(name: str) -> Callable[[EngineActor], None]:
    """Have the engine with this name die at its first start."""
    left = [name]

    def fate(actor: EngineActor) -> None:
        if actor.name in left:
            left.remove(actor.name)
            actor.die()

    return fate


@pytest.mark.parametrize("shared_gpus", [False, True])
async def test_ranks_load_after_engines_that_share_their_gpus(shared_gpus: bool, killed: list[Any]) -> None:
    """Also if an engine dies while it starts, and starts again. Without shared GPUs they do not wait."""
    factory = Factory(once("engine-1"))
    up: list[bool] = []

    class Watching(Trainers):
        async def start(self, checkpoint: Path | None) -> None:
            up.append(len(factory.made) == 3 and all(actor.started_on for actor in (factory.made[0], factory.made[2])))
            await super().start(checkpoint)

    _, notes, _ = await started(factory, Watching(), shared_gpus=shared_gpus)
    assert up == [shared_gpus]
    assert notes == [("engine", "engine-1", "the process died")]
    assert [actor.name for actor in factory.made] == ["engine-0", "engine-1", "engine-1"]
    assert killed == [(1002, signal.SIGKILL), factory.made[1]]


async def test_a_trainer_that_dies_while_it_starts_is_started_again() -> None:
    trainers = Trainers("preload", "prepare_model", "start")
    folder, notes, _ = await started(Factory(), trainers)
    assert folder == "/models/one"
    assert [cause for _, _, cause in notes] == ["died at preload", "died at prepare_model", "died at start"]
    assert trainers.calls[-3:] == ["preload", "prepare_model", "start /step-000004"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("block_size must be a multiple of 8"), "engine-1: ValueError: block_size must be a multiple of 8"),
        (ConfigError("vLLM has no argument 'nosuch'", location="rollout"), "rollout: vLLM has no argument"),
    ],
)
async def test_an_error_that_would_recur_is_not_retried(error: Exception, message: str) -> None:
    def fails(actor: EngineActor) -> None:
        if actor.name == "engine-1":
            raise error

    factory, notes = Factory(fails), Notes()
    with pytest.raises(UserError, match=message):
        await started(factory, Trainers(), notes=notes)
    assert [actor.name for actor in factory.made] == ["engine-0", "engine-1"], "no engine was started a second time"
    assert notes == []


# -- one engine's process


@pytest.mark.parametrize("address", [None, "there:6379"])
async def test_a_process_is_killed_by_its_number_only_on_this_machine(killed: list[Any], address: str | None) -> None:
    process = Factory(address=address).process("engine-0", Notes().budget())
    first = await process.running()
    await process.lose(first, "it is slow")
    assert killed == ([(1001, signal.SIGKILL)] if address is None else []) + [first]
    await process.running()
    assert process.actor.started_on == "/model_stub"
    assert (first.cache_bytes, process.actor.cache_bytes) == (None, 1001), "as its first start measured it"


async def test_a_process_is_killed_by_its_number_once(killed: list[Any]) -> None:
    """After the first time, the number may belong to another process."""
    process = Factory().process("engine-0", Notes().budget())
    await process.running()
    process.kill()
    process.kill()
    assert [entry for entry in killed if isinstance(entry, tuple)] == [(1001, signal.SIGKILL)]
