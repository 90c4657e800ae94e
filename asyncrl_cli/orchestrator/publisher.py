"""Brings new weights to all engines; every engine proves that it has loaded them.

A publish has four phases (decision 0038):

1. The ranks write their shards into their hosts' replicas. Afterwards they can train again.
2. The host agents compute the digests.
3. The engines' hosts pull the missing parts, while their engines generate with the old version.
4. Each engine pauses, loads, resumes and proves the new version.

Invariant: every engine that serves has proved the current version, or ``_deliver`` is waiting for its proof. An engine
proves a version by log-probs of a probe that agree with the trainer's. ``_deliver`` returns when no engine that gets
requests serves an older version, and only then the version is recorded. So a group admitted at version v has no token
older than v. Two places enforce this, and neither may contain an await: ``_deliver`` sets the current version and lists
the engines that serve; ``bring_up`` compares the proved version with the current one and marks the engine as serving.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.orchestrator.probe_check import ProbeCheck
from asyncrl_cli.orchestrator.replicas import AgentLost, Replicas, WrittenVersion
from asyncrl_cli.orchestrator.trainer_recovery import ResilientTrainer, StepPassed
from asyncrl_cli.orchestrator.watchdog import DRIVER, Watchdog
from asyncrl_cli.records.generation import Attestation
from asyncrl_cli.records.groups import Opening, PublishRecord
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
"""Seconds between two checks for engines that wait for weights that no host has."""


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
    transfer_s: float  # until its host had the version
    pause: tuple[float, float]  # begin and end, as unix times in seconds
    stall_s: float
    gap: float  # nats


@dataclass(slots=True, eq=False)
class Publisher:
    """Publishes one version at a time. A version that is lost before the engines have it is written again."""

    spec: ExperimentSpec
    opening: Opening
    trainer: ResilientTrainer
    client: GenerationClient
    replicas: Replicas
    buffer: Buffer
    watchdog: Watchdog
    budget: RestartBudget
    _check: ProbeCheck = field(init=False)
    _current: Publication | None = None
    _record: PublishRecord | None = None  # of the newest publish, until ``take_record``
    # Set while the hosts together have the current version, as far as we know.
    _available: asyncio.Event = field(default_factory=asyncio.Event)
    # Held while a version is written and its delivery begins: agents have memory for one write at a time.
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _delivery: asyncio.Task[None] | None = None
    _waiting: int = 0  # number of engines that wait for a version that no host has
    _usual_s: float | None = None  # duration of the fastest pull in the last publish that pulled

    def __post_init__(self) -> None:
        self._check = ProbeCheck(self.spec)

    @property
    def _timeout_s(self) -> float:
        """Limit of an engine's update, which with drain takes as long as its rollouts."""
        drains = self.spec.pipeline.weight_update == "drain"
        return self.spec.pipeline.stall_minutes * 60 if drains else self.spec.rollout.hang_seconds

    # -- publishing

    async def publish(self, version: int, waited_s: float = 0.0) -> None:
        """Have the ranks write ``version``, and start its delivery to the engines (see ``delivered``). When this
        returns, the ranks can train again, and the version survives the death of a rank.

        ``waited_s``: seconds that the trainer waited before the call, for the record.
        """
        async with self._turn:
            await self.delivered()  # agents have memory for two versions: the served one and the next
            written_version = await self._write(version)
            self._delivery = asyncio.create_task(self._deliver_and_record(written_version, waited_s))

    async def delivered(self) -> None:
        """Wait until no publish is in flight. Raises the publish's error. Cancelling the call does not cancel the
        publish: engines in the middle of an update would not be accounted for."""
        if self._delivery is not None:
            await asyncio.shield(self._delivery)

    def take_record(self) -> PublishRecord | None:
        """The record of the newest publish, once: the step that reports it takes it."""
        record, self._record = self._record, None
        return record

    async def restore(self, go_back: bool = True) -> None:
        """Write the current version again if no host has it: after a resume, or after its agents died.

        If the trainer is at a later step, it returns to a checkpoint with ``go_back``; otherwise nothing is done.
        """
        async with self._turn:
            await self.delivered()
            if self._available.is_set():
                return
            version, checksum = self.opening.version, self.opening.checksum
            if self._current is not None:
                version, checksum = self._current.manifest.version, self._current.manifest.checksum
            try:
                written_version = await self._write(version, go_back)
            except StepPassed:
                return  # the next version is on its way, and other engines serve until then
            record = await self._deliver(written_version)
        if record.checksum != checksum:
            await self.buffer.publish(record)
        if checksum not in (None, record.checksum):  # a warning, not an error: the engines serve what the trainer has
            await self.budget.note(
                "weights",
                "trainer-0",
                f"made version {version} again with other bits; expected after a change of settings or "
                "hardware, and on GPUs without deterministic kernels",
            )

    async def guard(self) -> None:
        """Restore the current version when engines wait for it and every host has lost it. Never ends."""
        while True:
            await asyncio.sleep(GUARD_S)
            # A publish in flight brings a newer version, and writes it again if it is lost.
            publishing = self._turn.locked() or (self._delivery is not None and not self._delivery.done())
            if self._waiting and not self._available.is_set() and not publishing:
                step = self.trainer.step
                # If no engine serves, waiting for the next version would never end: no rollouts, no batch, no step.
                await self.restore(go_back=not self.client.serving())
                await self.trainer.catch_up(step)

    async def _write(self, version: int, go_back: bool = True) -> WrittenVersion:
        """Raises ``StepPassed`` if the trainer is at a later step; with ``go_back`` it returns to a checkpoint."""

        async def write() -> WrittenVersion:
            self.replicas.keep({*self.trainer.ranks.nodes, *(engine.process.node for engine in self.client.engines)})
            served = None if self._current is None else self._current.manifest
            writing = self.replicas.write(self.trainer.ranks, version, served)
            return await self.watchdog.until(writing, DRIVER, f"the trainer to write version {version}")

        cause = f"every host has lost version {version}, so the trainer writes it again"
        return await self.trainer.at_step(
            version * self.spec.pipeline.publish_every, write, go_back=cause if go_back else ""
        )

    async def _deliver_and_record(self, written_version: WrittenVersion, waited_s: float) -> None:
        purpose = f"every engine to load version {written_version.version}"
        record = await self.watchdog.until(self._deliver(written_version), DRIVER, purpose)
        record = replace(record, waited_s=waited_s)
        # Only now, when all engines have proved it: recording it raises the ledger's version, and a group admitted at
        # this version must not get an older token (decision 0001).
        await self.buffer.publish(record)
        self._record = record
        self.client.room.set()  # the ledger has room for groups at the new version

    async def _deliver(self, written_version: WrittenVersion) -> PublishRecord:
        """Have all serving engines load and prove a version. The ranks may train during the call.

        An engine that fails is marked as dead. If an engine's host does not get the version in time, the engine stops
        serving until ``bring_up``, and other engines continue its requests. Engines that already serve the same bytes
        load nothing; this happens when a version was written again for new engines.
        """
        started = time.monotonic()
        while True:
            try:
                manifest = await self.replicas.manifest(written_version)
                break
            except AgentLost:
                # The bytes existed only in the agent's memory, so the ranks must write them again. They may have
                # trained the next step by now; going back is the only way to these weights.
                written_version = await self._write(written_version.version)
        served, probe = self._current, written_version.probe
        same = served is not None and served.manifest == manifest
        last_probe = None if served is None else served.last_probe if same else served.probe.logprobs
        # No await from here to the list of engines. With one, ``bring_up`` could mark an engine as serving the old
        # version after the list was made, and the engine would never get this version.
        self._current = publication = Publication(manifest, probe, last_probe)
        if served is not None:
            served.replaced.set()
        engines = [] if same else self.client.serving()
        self._available.set()
        updates = await self._update_all(engines, publication)
        return PublishRecord(
            version=written_version.version,
            step=written_version.version * self.spec.pipeline.publish_every,
            checksum=manifest.checksum,
            seconds=written_version.seconds + time.monotonic() - started,
            stall_s=max((update.stall_s for update in updates), default=0.0),
            gap=max((update.gap for update in updates), default=0.0),
            change=0.0 if served is None else self._check.distance(probe.logprobs, served.probe.logprobs),
            write_s=written_version.seconds,
            transfer_s=max((update.transfer_s for update in updates), default=0.0),
            pauses={update.engine: update.pause for update in updates},
        )

    async def _update_all(self, engines: Sequence[EngineState], publication: Publication) -> list[Update]:
        """Update each engine as soon as its host has the version; returns the successful updates."""
        nodes = {engine.process.node for engine in engines}
        # One pull for each host, however many engines it has.
        pulls = {node: asyncio.ensure_future(self.replicas.pull(node, publication.manifest)) for node in nodes}
        too_late = asyncio.ensure_future(self._too_late(pulls.values()))
        try:
            updates = await asyncio.gather(
                *(self._update(engine, publication, pulls[engine.process.node], too_late) for engine in engines)
            )
        finally:
            # This ends only the driver's wait. A late host's agent continues its pull, and ``bring_up`` joins it.
            for waiting in (too_late, *pulls.values()):
                waiting.cancel()
        return [update for update in updates if update is not None]

    async def _too_late(self, pulls: Iterable[asyncio.Future[Pulled]]) -> None:
        """Return when every host that still lacks the version counts as late (see ``LATE_S``).

        One slow host must not hold back a publish: the version is recorded only after all serving engines have it.
        """
        started, waiting = time.monotonic(), set(pulls)
        fastest: float | None = None
        while waiting:
            usual_s = self._usual_s if fastest is None else fastest
            left_s = None if usual_s is None else max(0.0, 2 * usual_s + LATE_S - (time.monotonic() - started))
            finished_pulls, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not finished_pulls:
                return
            for pull in finished_pulls:
                # Hosts that fetched nothing do not count: the ranks wrote there, so they were done at once.
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
            await _wait_for_any(pull, too_late)
            if not pull.done():
                raise PullFailed(f"its host did not get weight version {version} in time", location=engine.name)
            return await self._prove(engine, publication, pull.result())
        except (PullFailed, ReplicaGone) as missing:
            # Not the engine's fault: it serves again when its host has the version (``bring_up``).
            await self.client.withdraw(engine, min(WITHDRAW_S, self.spec.rollout.hang_seconds))
            await self.budget.note("weights", engine.name, f"{missing.message}; it does not serve until then")
        except RunError as error:
            # If its keeper has replaced the process in the meantime, the new process is not at fault.
            if engine.process.actor is actor:
                self.client.mark_dead(engine.name, error.message)
        return None

    # -- engines that start

    async def bring_up(self, engine: EngineState) -> None:
        """Have an engine load and prove the current version, then serve. Raises ``RunError`` if it fails."""
        while True:
            self._waiting += 1
            try:
                await self._available.wait()
            finally:
                self._waiting -= 1
            publication = self._current
            assert publication is not None
            pull = asyncio.ensure_future(self.replicas.pull(engine.process.node, publication.manifest))
            replaced = asyncio.ensure_future(publication.replaced.wait())
            try:
                # A host slower than the publishes skips versions; otherwise it would never have the current one.
                await _wait_for_any(pull, replaced)
                if not pull.done():
                    continue
                await self._prove(engine, publication, pull.result())
            except (PullFailed, ReplicaGone):
                if self._current is publication:
                    if await self.replicas.have(publication.manifest):
                        await asyncio.sleep(RETRY_S)
                    elif self._current is publication:
                        self._available.clear()  # for ``guard``, which has the trainer write it again
                continue
            finally:
                pull.cancel()
                replaced.cancel()
            # No await between the two lines: a later ``_deliver`` must find this engine in its list.
            if self._current is publication:
                engine.serving = True
                return

    async def _prove(self, engine: EngineState, publication: Publication, pulled: Pulled) -> Update:
        """Update one engine. Raises ``RunError`` if it fails the probe."""
        name, actor = engine.name, engine.process.actor
        manifest, probe = publication.manifest, publication.probe
        if actor is None:  # its keeper starts another one
            raise ActorLost("it was lost before the update", location=name)
        answer: Attestation = await wait_for(
            actor.update_weights.remote(
                manifest.version, pulled.path, manifest.slots, self.spec.pipeline.weight_update, probe.ids, probe.images
            ),
            name,
            self._timeout_s + seconds_for(size_of(manifest.slots)),
        )
        resumed_at = time.time() - answer.resumed_s
        verdict = self._check.judge(
            answer.probe_logprobs, probe.logprobs, previous_probe=publication.last_probe, base=probe.base_logprobs
        )
        reports_version = answer.version == manifest.version
        refusal = verdict.refusal if reports_version else f"it reports version {answer.version}"
        if refusal:
            raise RunError(
                f"it does not serve weight version {manifest.version}: {refusal}",
                location=name,
                hint="this is a fault of the engine's weight update; please report it with the log",
            )
        return Update(
            engine=name,
            transfer_s=pulled.seconds,
            pause=(resumed_at - answer.stall_s, resumed_at),
            stall_s=answer.stall_s,
            gap=verdict.gap,
        )


async def _wait_for_any(*either: asyncio.Future[Any]) -> None:
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
