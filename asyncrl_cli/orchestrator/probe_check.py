"""Checks whether an engine's log-probs of the probe belong to a weight version (decision 0003)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from asyncrl_cli.spec.sections import ExperimentSpec

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest allowed gap in nats between an engine's and the trainer's log-probs of the probe, by the coarser dtype of the
two. In fp32 they agree to about 1e-5; one optimizer update of the quickstart moves the probe by 1e-2."""
NOISE = {"float32": 1e-4, "bfloat16": 0.02}
"""By dtype: two versions can be told apart if their probes differ by more nats than this."""
GAP_FACTOR, MIN_TOLERANCE = 5.0, 0.1
"""In bfloat16 an engine's gap may be ``GAP_FACTOR`` times the gap of the first engine that proved a version, and always
at least ``MIN_TOLERANCE`` nats."""


class Verdict(NamedTuple):
    """The judgement of an engine's log-probs."""

    gap: float  # distance to the trainer's log-probs in nats
    refusal: str = ""  # why the engine may not serve; empty if it may


class ProbeCheck:
    """Compares the probe's log-probs of engines and trainer.

    In float32 the largest difference of a token counts, in bfloat16 the median difference: rounding may route a token
    to other experts, and an improbable token's log-prob is a difference of large rounded logits. So single tokens of a
    correct engine may differ by any amount, while a wrong layer changes all of them.
    """

    def __init__(self, spec: ExperimentSpec) -> None:
        coarsest = "bfloat16" if "bfloat16" in (spec.trainer.dtype, spec.rollout.dtype) else "float32"
        self._exact = coarsest == "float32"
        self._noise = NOISE[coarsest]
        self.tolerance = TOLERANCE[coarsest]
        """The allowed gap in nats; in bfloat16 it is lowered when the first engine has proved a version."""
        self._learned = self._exact

    def distance(self, logprobs: np.ndarray, reference: np.ndarray) -> float:
        """The distance in nats between two sets of the probe's log-probs."""
        differences = np.abs(logprobs - reference)
        return float(differences.max() if self._exact else np.median(differences))

    def judge(
        self,
        answer: np.ndarray,
        probe: np.ndarray,
        previous_probe: np.ndarray | None = None,
        base: np.ndarray | None = None,
    ) -> Verdict:
        """Judge an engine's log-probs of the probe.

        ``answer``: the engine's log-probs. ``probe`` and ``previous_probe``: the trainer's under this version and the
        previous one. ``base``: the trainer's without adapters, for engines that apply adapters. All are [tokens].
        """
        gap, tolerance = self.distance(answer, probe), self.tolerance

        def as_near_to(reference: np.ndarray) -> bool:
            # Noise: versions that are too similar cannot be told apart.
            return self.distance(probe, reference) > self._noise and gap >= self.distance(answer, reference)

        how = "" if self._exact else " in the median"
        differ = f"its log-probs of the probe differ from the trainer's by {gap:.3g} nats{how}"
        if base is not None and as_near_to(base):
            return Verdict(gap, f"{differ}, more than from the log-probs without adapters")
        # A small update moves the probe by less than the tolerance. An engine that missed it is then found by its
        # distance to the previous version. ``not <=``: NaN must be refused.
        if not gap <= tolerance or (previous_probe is not None and as_near_to(previous_probe)):
            limit = f"at most {tolerance:.3g} are allowed, and less than from the previous version's"
            return Verdict(gap, f"{differ}; {limit}")
        if not self._learned:
            self._learned = True
            self.tolerance = min(tolerance, max(MIN_TOLERANCE, GAP_FACTOR * gap))
            self._noise = max(self._noise, 3 * gap)
        return Verdict(gap)
