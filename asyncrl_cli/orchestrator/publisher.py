"""Publishing: new weights reach every engine, and every engine proves that it serves them.

Invariant: an engine serves rollouts only after it has answered a probe with log-probs that agree with the
trainer's own under the same weights. An engine that kept an old copy of any layer cannot. ``serve`` and
``bring_up`` take turns, so that the mapping is never written while an engine reads it.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator.trainers import TrainerRanks
from asyncrl_cli.orchestrator.watchdog import DRIVER, Watchdog
from asyncrl_cli.records.generation import Attestation
from asyncrl_cli.records.groups import PublishRecord
from asyncrl_cli.records.training import Publication
from asyncrl_cli.rollout.client import EngineState, GenerationClient
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.remote import ActorLost, wait_for

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest difference in nats between an engine's and the trainer's log-probs of the probe, by the coarser
dtype of the two. In fp32 agreement is near 1e-5; one optimizer update of the quickstart moves the probe by 1e-2."""
NOISE = {"float32": 1e-4, "bfloat16": 0.1}
"""Nats, likewise: two versions whose probes differ by more than this can be distinguished."""


class Publisher:
    """Publishes one version at a time."""

    def __init__(self, spec: ExperimentSpec, ranks: TrainerRanks, client: GenerationClient, watchdog: Watchdog) -> None:
        self._ranks = ranks
        self._client = client
        self._watchdog = watchdog
        self._publish_every = spec.pipeline.publish_every
        # An engine that drains takes as long as its rollouts do.
        drains = spec.pipeline.weight_update == "drain"
        self._timeout_s = spec.pipeline.stall_minutes * 60 if drains else spec.rollout.hang_seconds
        coarsest = "bfloat16" if "bfloat16" in (spec.trainer.dtype, spec.rollout.dtype) else "float32"
        self._tolerance, self._noise = TOLERANCE[coarsest], NOISE[coarsest]
        self._policy = spec.pipeline.weight_update
        self._current: Publication | None = None
        self._last_probe: np.ndarray | None = None
        self._lock = asyncio.Lock()
        self._available = asyncio.Event()

    @property
    def checksum(self) -> str | None:
        """The checksum of the version that engines serve."""
        return None if self._current is None else self._current.checksum

    @property
    def available(self) -> bool:
        """Whether the weights of the current version lie ready for engines."""
        return self._available.is_set()

    def lost(self) -> None:
        """The trainer is gone, and the mapping with it: no engine can be brought up before the next ``serve``."""
        self._available.clear()

    async def serve(self, version: int) -> PublishRecord:
        """Have the trainer write ``version``, and all engines that serve by then load and prove it.

        An engine that cannot is marked dead and skipped. When the very same weights are being served already, as after
        a trainer's restart, the engines are not disturbed. Raises ``TrainerLost``.
        """
        async with self._lock:  # the mapping is not written while an engine that comes up reads it (decision 0002)
            started = time.monotonic()
            try:
                writing = self._ranks.publish(version)
                publication = await self._watchdog.until(writing, DRIVER, f"the trainer to write version {version}")
            except BaseException:
                self.lost()  # the mapping may be half written
                raise
            served, self._current = self._current, publication
            self._available.set()
            change = 0.0 if served is None else _distance(publication.probe_logprobs, served.probe_logprobs)
            engines: list[EngineState] = []
            if served is None or (served.version, served.checksum) != (version, publication.checksum):
                self._last_probe = None if served is None else served.probe_logprobs
                # After the write: an engine that has come up meanwhile is included; none joins from here on.
                engines = self._client.serving()
            reports = await asyncio.gather(*(self._update(engine) for engine in engines))
            proved = [report for report in reports if report is not None]
            return PublishRecord(
                version=version,
                step=version * self._publish_every,
                checksum=publication.checksum,
                seconds=time.monotonic() - started,
                stall_s=max((stall for stall, _ in proved), default=0.0),
                gap=max((gap for _, gap in proved), default=0.0),
                change=change,
            )

    async def bring_up(self, engine: EngineState) -> None:
        """Have a new engine load and prove the current version, and serve. Raises ``RunError`` when it cannot."""
        while True:
            await self._available.wait()
            async with self._lock:
                if self._available.is_set():  # the trainer may have been lost while others had the lock
                    await self._prove(engine)
                    # Within the lock: the next publish must find it among those that serve (decision 0003).
                    engine.serving = True
                    return

    async def _update(self, engine: EngineState) -> tuple[float, float] | None:
        try:
            return await self._prove(engine)
        except RunError as error:
            self._client.mark_dead(engine.name, error.message)
            return None

    async def _prove(self, engine: EngineState) -> tuple[float, float]:
        """Update one engine; returns its stall in seconds and its gap in nats."""
        name, actor = engine.name, engine.process.actor
        publication, last = self._current, self._last_probe
        assert publication is not None
        if actor is None:  # lost since it was chosen; its keeper has another started
            raise ActorLost("it was lost before the update", location=name)
        answer: Attestation = await wait_for(
            actor.update_weights.remote(
                *(publication.version, publication.checksum, publication.source, self._policy, publication.probe_ids)
            ),
            name,
            self._timeout_s,
        )
        gap = _distance(answer.probe_logprobs, publication.probe_logprobs)
        change = 0.0 if last is None else _distance(publication.probe_logprobs, last)
        # A small update moves the probe by less than the tolerance: then the engine must at least be nearer to
        # this version than to the last one.
        outdated = last is not None and change > self._noise and gap >= _distance(answer.probe_logprobs, last)
        if answer.version != publication.version or not gap <= self._tolerance or outdated:
            raise RunError(
                f"it does not serve weight version {publication.version}: its log-probs of the probe differ from the "
                f"trainer's by {gap:.3g} nats; allowed are {self._tolerance:g}, and less than from the last version's",
                location=name,
                hint="this is a fault of the engine's weight update; please report it with the log",
            )
        return answer.stall_s, gap


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max())
