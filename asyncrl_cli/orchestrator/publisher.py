"""Publishing: brings new weights to all engines, and each engine proves that it serves them.

The phases of a publish: the ranks write their shards into the replicas of their hosts, and are free again; the agents
compute the digests; the hosts of engines pull the parts that they lack, while their engines generate with the old
version; then each engine pauses, loads, resumes and proves the new version (decision 0038).

Invariant: an engine that serves has answered a probe with log-probs that agree with the trainer's own under the weights
of the current version, or ``_deliver`` is waiting for it to do so. When ``_deliver`` returns, which is before its
record is made durable, no engine that gets requests serves an older version: a group that is admitted at version v has
no token older than v. Two places ensure this, and neither may contain an await: ``_deliver`` makes a version the
current one and lists the engines that serve; ``bring_up`` compares the version that an engine has proved with the
current one, and has it serve.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.orchestrator.probe_check import ProbeCheck
from asyncrl_cli.orchestrator.replicas import AgentLost, Replicas, Written
from asyncrl_cli.orchestrator.trainer_recovery import ResilientTrainer, StepPassed
from asyncrl_cli.orchestrator.trainers import TrainerRanks
from asyncrl_cli.orchestrator.watchdog import DRIVER, Watchdog
from asyncrl_cli.records.generation import Attestation
from asyncrl_cli.records.groups import PublishRecord
from asyncrl_cli.records.training import Probe
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.rollout.open_requests import EngineState
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.remote import ActorLost, seconds_for, wait_for
from asyncrl_cli.system.supervised_actor import RestartBudget
from asyncrl_cli.weights.layout import size_of
from asyncrl_cli.weights.manifest import Manifest, Pulled, PullFailed, ReplicaGone

LATE_S = 10.0
"""A host is late when it takes more than twice as long as the fastest host plus this many seconds."""
WITHDRAW_S = 10.0
"""Seconds that an engine has to return its requests when it is taken out of service."""
RETRY_S = 1.0
"""Seconds until a host that could not get a version tries again."""
GUARD_S = 2.0
"""Seconds between two checks whether engines wait for weights that no host has."""


@dataclass(frozen=True, slots=True, eq=False)
class Publication:
    """A version that engines can load."""

    manifest: Manifest
    probe: Probe
    last_probe: np.ndarray | None
    """The trainer's log-probs of the probe under the previous version."""
    replaced: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the version is no longer the current one."""


@dataclass(frozen=True, slots=True)
class Update:
    """One engine's update to a version."""

    engine: str
    transfer_s: float  # that its host took to get the version
    pause: tuple[float, float]  # begin and end, as unix times in seconds
    stall_s: float
    gap: float  # nats


class Publisher:
    """Publishes one version at a time, and writes a version again that is lost before the engines have it."""

    def __init__(
        self,
        spec: ExperimentSpec,
        *,
        trainer: ResilientTrainer,
        ranks: TrainerRanks,
        client: GenerationClient,
        replicas: Replicas,
        buffer: Buffer,
        watchdog: Watchdog,
        budget: RestartBudget,
        opened: tuple[int, str | None],
        published: Callable[[PublishRecord], None],
    ) -> None:
        """``opened``: the version that the journal has when the run is opened, and the checksum of its bytes; None if
        its publish was not recorded. ``published`` gets the record of each ``publish`` once it is durable."""
        self._trainer = trainer
        self._ranks = ranks
        self._client = client
        self._replicas = replicas
        self._buffer = buffer
        self._watchdog = watchdog
        self._budget = budget
        self._opened = opened
        self._published = published
        self._publish_every = spec.pipeline.publish_every
        # With drain, an engine's update takes as long as its rollouts.
        drains = spec.pipeline.weight_update == "drain"
        self._timeout_s = spec.pipeline.stall_minutes * 60 if drains else spec.rollout.hang_seconds
        self._withdraw_s = min(WITHDRAW_S, spec.rollout.hang_seconds)
        self._check = ProbeCheck(spec)
        self._policy = spec.pipeline.weight_update
        self._current: Publication | None = None
        self._available = asyncio.Event()  # as far as is known, the hosts together have the current version
        self._turn = asyncio.Lock()  # held from the begin of a write until the delivery has begun or is done
        self._delivery: asyncio.Task[None] | None = None
        self._waiting = 0  # number of engines that wait for a version that no host has
        self._usual_s: float | None = None  # seconds of the fastest host's pull in the newest publish with one

    # -- publishing

    async def publish(self, version: int, waited_s: float = 0.0) -> None:
        """Have the ranks write the weights after the steps of ``version``. When this returns, the ranks can train
        again, and the version survives the death of a rank; it is on its way to the engines (``delivered``).

        ``waited_s``: seconds that the trainer has waited before, for the record.
        """
        async with self._turn:
            await self.delivered()  # agents have room for two versions: the one that is served, and one more
            written = await self._write(version)
            self._delivery = asyncio.create_task(self._deliver_and_record(written, waited_s))

    async def delivered(self) -> None:
        """Return when no publish is in flight; raises its error. Cancelling the call does not cancel the publish."""
        if self._delivery is not None:
            await asyncio.shield(self._delivery)

    async def restore(self, go_back: bool = True) -> None:
        """Write the present version again, because engines need it and no host has it: after a resume, and when the
        agents that had it are lost. Without ``go_back`` only if the trainer has not trained another step since."""
        async with self._turn:
            await self.delivered()
            if self._available.is_set():
                return
            version, checksum = self._opened
            if self._current is not None:
                version, checksum = self._current.manifest.version, self._current.manifest.checksum
            try:
                written = await self._write(version, go_back)
            except StepPassed:
                return  # the next version is on its way, and other engines serve until then
            record = await self._deliver(written)
        if checksum is None:
            await self._buffer.publish(record)
        elif record.checksum != checksum:
            await self._budget.note(
                "weights",
                "trainer-0",
                f"made version {version} again with other bits; expected after a change of settings or "
                "hardware, and on GPUs without deterministic kernels",
            )

    async def guard(self) -> None:
        """Restore the present version when engines wait for it and no host has it any more. Never ends."""
        while True:
            await asyncio.sleep(GUARD_S)
            # A publish that is in flight brings a version itself, or writes its own again.
            publishing = self._turn.locked() or (self._delivery is not None and not self._delivery.done())
            if self._waiting and not self._available.is_set() and not publishing:
                step = self._trainer.step
                # Without engines there is no batch, and so no step after which the next version would be published.
                await self.restore(go_back=not self._client.serving())
                await self._trainer.catch_up(step)

    async def _write(self, version: int, go_back: bool = True) -> Written:
        """Raises ``StepPassed``, unless ``go_back``: then ranks that have trained since return to a checkpoint."""

        async def write() -> Written:
            self._replicas.keep({*self._ranks.nodes, *(engine.process.node for engine in self._client.engines)})
            served = None if self._current is None else self._current.manifest
            writing = self._replicas.write(self._ranks, version, served)
            return await self._watchdog.until(writing, DRIVER, f"the trainer to write version {version}")

        cause = f"every host has lost version {version}, and it has to be written again"
        return await self._trainer.at(version * self._publish_every, write, go_back=cause if go_back else "")

    async def _deliver_and_record(self, written: Written, waited_s: float) -> None:
        what = f"every engine to load version {written.version}"
        record = await self._watchdog.until(self._deliver(written), DRIVER, what)
        record = replace(record, waited_s=waited_s)
        # After all engines have proved it: a group that is admitted at a version holds no older token (decision 0001).
        await self._buffer.publish(record)
        self._published(record)

    async def _deliver(self, written: Written) -> PublishRecord:
        """Have all serving engines load and prove a version, while the ranks may train.

        An engine that fails is marked as dead. An engine stops serving until ``bring_up`` if its host does not get the
        version in time, and its requests continue on other engines. If the engines serve the same weights already, for
        example because they were written again for new engines, nothing is loaded.
        """
        started = time.monotonic()
        while True:
            try:
                manifest = await self._replicas.manifest(written)
                break
            except AgentLost:
                # The agents had these bytes in memory only: the ranks are their one source.
                written = await self._write(written.version)
        served, probe = self._current, written.probe
        same = served is not None and served.manifest == manifest
        last = None if served is None else served.last_probe if same else served.probe.logprobs
        # No await before the list of engines: an engine in ``bring_up`` either serves by now, or finds that the
        # version it has proved is no longer the current one.
        self._current = publication = Publication(manifest, probe, last)
        if served is not None:
            served.replaced.set()
        engines = [] if same else self._client.serving()
        self._available.set()
        updates = await self._update_all(engines, publication)
        return PublishRecord(
            version=written.version,
            step=written.version * self._publish_every,
            checksum=manifest.checksum,
            seconds=written.seconds + time.monotonic() - started,
            stall_s=max((update.stall_s for update in updates), default=0.0),
            gap=max((update.gap for update in updates), default=0.0),
            change=0.0 if served is None else self._check.distance(probe.logprobs, served.probe.logprobs),
            write_s=written.seconds,
            transfer_s=max((update.transfer_s for update in updates), default=0.0),
            pauses={update.engine: update.pause for update in updates},
        )

    async def _update_all(self, engines: Iterable[EngineState], publication: Publication) -> list[Update]:
        """Update engines to a version, each as soon as its host has it. Returns the updates of the engines that serve
        it."""
        hosts: dict[str, list[EngineState]] = {}
        for engine in engines:
            hosts.setdefault(engine.process.node, []).append(engine)
        pulls = {node: asyncio.ensure_future(self._replicas.pull(node, publication.manifest)) for node in hosts}
        too_late = asyncio.ensure_future(self._too_late(pulls.values()))
        try:
            updates = await asyncio.gather(
                *(
                    self._update(engine, publication=publication, pull=pulls[node], too_late=too_late)
                    for node, group in hosts.items()
                    for engine in group
                )
            )
        finally:
            # Only the wait ends: the agent of a late host continues, and ``bring_up`` asks it for the version again.
            for waiting in (too_late, *pulls.values()):
                waiting.cancel()
        return [update for update in updates if update is not None]

    async def _too_late(self, pulls: Iterable[asyncio.Future[Pulled]]) -> None:
        """Return at the time at which all hosts that do not have the version yet count as late."""
        started, waiting = time.monotonic(), set(pulls)
        fastest: float | None = None
        while waiting:
            usual_s = self._usual_s if fastest is None else fastest
            left_s = None if usual_s is None else max(0.0, 2 * usual_s + LATE_S - (time.monotonic() - started))
            done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return
            for pull in done:
                # A host on which all ranks have written fetches nothing.
                if pull.exception() is None and pull.result().fetched_bytes and fastest is None:
                    self._usual_s = fastest = pull.result().seconds

    async def _update(
        self,
        engine: EngineState,
        publication: Publication,
        pull: asyncio.Future[Pulled],
        too_late: asyncio.Future[None],
    ) -> Update | None:
        actor, version = engine.process.actor, publication.manifest.version
        try:
            await _first(pull, too_late)
            if not pull.done():
                raise PullFailed(f"its host has not got weight version {version} in time", location=engine.name)
            pulled = pull.result()
            answer, gap = await self._prove(engine, publication, pulled.path)
            resumed_at = time.time() - answer.resumed_s
            return Update(
                engine=engine.name,
                transfer_s=pulled.seconds,
                pause=(resumed_at - answer.stall_s, resumed_at),
                stall_s=answer.stall_s,
                gap=gap,
            )
        except (PullFailed, ReplicaGone) as missing:
            # Not a fault of the engine: it serves again when its host has the version (``bring_up``).
            await self._client.withdraw(engine, self._withdraw_s)
            await self._budget.note("weights", engine.name, f"{missing.message}; it does not serve until then")
        except RunError as error:
            # Its keeper may have replaced it meanwhile: the new process is not at fault.
            if engine.process.actor is actor:
                self._client.mark_dead(engine.name, error.message)
        return None

    # -- engines that start

    async def bring_up(self, engine: EngineState) -> None:
        """Have an engine load and prove the current version, and serve. Raises ``RunError`` when it cannot."""
        while True:
            self._waiting += 1
            try:
                await self._available.wait()
            finally:
                self._waiting -= 1
            publication = self._current
            assert publication is not None
            pull = asyncio.ensure_future(self._replicas.pull(engine.process.node, publication.manifest))
            replaced = asyncio.ensure_future(publication.replaced.wait())
            try:
                # A host that is too slow fetches the newest version, and skips those that were replaced meanwhile.
                await _first(pull, replaced)
                if not pull.done():
                    continue
                await self._prove(engine, publication, pull.result().path)
            except (PullFailed, ReplicaGone):
                await self._get_again(publication)
                continue
            finally:
                pull.cancel()
                replaced.cancel()
            # No await in between: from here on the next ``_deliver`` lists it.
            if self._current is publication:
                engine.serving = True
                return

    async def _get_again(self, publication: Publication) -> None:
        """After a host failed to get a version: wait until the next attempt, or have the trainer write it again."""
        if self._current is not publication:
            return  # the current version is newer
        if await self._replicas.have(publication.manifest):
            await asyncio.sleep(RETRY_S)
        elif self._current is publication:
            self._available.clear()

    async def _prove(self, engine: EngineState, publication: Publication, path: str) -> tuple[Attestation, float]:
        """Update one engine; returns its answer and its gap in nats."""
        name, actor = engine.name, engine.process.actor
        manifest, probe = publication.manifest, publication.probe
        if actor is None:  # lost since it was chosen; its keeper starts another one
            raise ActorLost("it was lost before the update", location=name)
        answer: Attestation = await wait_for(
            actor.update_weights.remote(manifest.version, path, manifest.slots, self._policy, probe.ids, probe.images),
            name,
            self._timeout_s + seconds_for(size_of(manifest.slots)),
        )
        gap, refused = self._check.judge(
            answer.probe_logprobs, probe.logprobs, last=publication.last_probe, base=probe.base_logprobs
        )
        if answer.version != manifest.version:
            refused = f"it reports version {answer.version}"
        if refused:
            raise RunError(
                f"it does not serve weight version {manifest.version}: {refused}",
                location=name,
                hint="this is a fault of the engine's weight update; please report it with the log",
            )
        return answer, gap


async def _first(*either: asyncio.Future[Any]) -> None:
    """Return when one of them is done."""
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
