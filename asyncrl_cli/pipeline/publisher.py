"""Publishing: new weights reach every engine, and every engine proves that it serves them.

Invariant: when ``publish`` returns, each engine has answered a probe with log-probs that agree with the
trainer's own under the same weights. An engine that kept an old copy of any layer cannot.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np

from asyncrl_cli.pipeline.fleet import Fleet
from asyncrl_cli.pipeline.remote import wait_for
from asyncrl_cli.rollout.records import Attestation
from asyncrl_cli.runs.directory import RunError
from asyncrl_cli.train.records import Publication

NOISE = {"float32": 1e-4, "bfloat16": 0.1}
"""Nats, likewise: two versions whose probes differ by more than this can be told apart."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest difference in nats between an engine's and the trainer's log-probs of the probe, by the coarser
dtype of the two. In fp32 agreement is near 1e-5; one optimizer update of the quickstart moves the probe by 1e-2."""


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What a publish took and showed. ``gap`` and ``change`` are in nats: the largest difference between
    engine and trainer, and between this version's probe and the last one's."""

    version: int
    seconds: float
    stall_s: float
    gap: float
    change: float


class Publisher:
    """Publishes one version at a time."""

    def __init__(self, fleet: Fleet, timeout_s: float) -> None:
        self._fleet = fleet
        self._timeout_s = timeout_s
        spec = fleet.spec
        coarsest = "bfloat16" if "bfloat16" in (spec.trainer.dtype, spec.rollout.dtype) else "float32"
        self._tolerance, self._noise = TOLERANCE[coarsest], NOISE[coarsest]
        self._policy = spec.pipeline.weight_update
        self._last_probe: np.ndarray | None = None

    async def publish(self, version: int) -> PublishReport:
        """Send the trainer's weights to all engines as ``version``.

        Raises ``RunError`` when an engine does not prove them.
        """
        started = time.monotonic()
        publication: Publication = (await self._fleet.train("publish", version))[0]
        attestations: list[Attestation] = await asyncio.gather(
            *(
                wait_for(
                    actor.update_weights.remote(
                        version, publication.checksum, publication.source, self._policy, publication.probe_ids
                    ),
                    name,
                    self._timeout_s,
                )
                for name, actor in self._fleet.engines
            )
        )
        served = [answer.probe_logprobs for answer in attestations]
        gaps = [_distance(logprobs, publication.probe_logprobs) for logprobs in served]
        last, self._last_probe = self._last_probe, publication.probe_logprobs
        change = 0.0 if last is None else _distance(publication.probe_logprobs, last)
        for (name, _), answer, gap in zip(self._fleet.engines, attestations, gaps, strict=True):
            # A small update moves the probe by less than the tolerance: then the engine must at least be
            # nearer to this version than to the last one.
            outdated = last is not None and change > self._noise and gap >= _distance(answer.probe_logprobs, last)
            if answer.version != version or not gap <= self._tolerance or outdated:
                raise RunError(
                    f"it does not serve weight version {version}: its log-probs of the probe differ from the "
                    f"trainer's by {gap:.3g} nats; allowed are {self._tolerance:g}, and less than from the last "
                    "version's",
                    place=name,
                    mend="This is a fault of the engine's weight update; please report it with the log",
                )
        return PublishReport(
            version=version,
            seconds=time.monotonic() - started,
            stall_s=max(answer.stall_s for answer in attestations),
            gap=max(gaps),
            change=change,
        )


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max())
