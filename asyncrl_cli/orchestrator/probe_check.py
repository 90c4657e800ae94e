"""Checks whether an engine's log-probs of the probe belong to a weight version (decision 0003)."""

from __future__ import annotations

import numpy as np

from asyncrl_cli.spec.sections import ExperimentSpec

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest gap in nats between an engine's and the trainer's log-probs of the probe, by the coarser dtype of the two. In
fp32 agreement is near 1e-5; one optimizer update of the quickstart moves the probe by 1e-2."""
NOISE = {"float32": 1e-4, "bfloat16": 0.02}
"""In nats, by dtype: two versions can be distinguished if their probes differ by more than this."""
USUAL, LEAST = 5.0, 0.1
"""In bfloat16 an engine's gap may be this many times that of the first engine that proved a version, and always at
least this many nats."""


class ProbeCheck:
    """Compares the probe's log-probs of engines and trainer.

    In float32 the largest difference of a token counts. In bfloat16 it is the median: a mixture-of-experts model may
    route a token elsewhere, and an improbable token's log-prob is a difference of large rounded logits, so single
    tokens of a sound engine differ by any amount. A wrong layer changes them all.
    """

    def __init__(self, spec: ExperimentSpec) -> None:
        coarsest = "bfloat16" if "bfloat16" in (spec.trainer.dtype, spec.rollout.dtype) else "float32"
        self._exact = coarsest == "float32"
        self._noise = NOISE[coarsest]
        self.tolerance = TOLERANCE[coarsest]
        """The allowed gap in nats; in bfloat16 it is lowered once an engine has proved a version."""
        self._learned = self._exact

    def distance(self, one: np.ndarray, other: np.ndarray) -> float:
        """The distance between two sets of log-probs of the probe, in nats."""
        differences = np.abs(one - other)
        return float(differences.max() if self._exact else np.median(differences))

    def judge(
        self, answer: np.ndarray, probe: np.ndarray, last: np.ndarray | None = None, base: np.ndarray | None = None
    ) -> tuple[float, str]:
        """Return the gap to the trainer's log-probs in nats, and why the engine may not serve; empty when it may.

        ``answer``: the engine's log-probs. ``probe``, ``last``: the trainer's, of this version and the last one.
        ``base``: the trainer's for the model without adapters, where the engine has to apply them.
        """
        gap, allowed = self.distance(answer, probe), self.tolerance

        def as_near_to(other: np.ndarray) -> bool:
            """True if the answer is as near to log-probs under other weights, which differ by more than noise."""
            return self.distance(probe, other) > self._noise and gap >= self.distance(answer, other)

        how = "" if self._exact else " in the median"
        differ = f"its log-probs of the probe differ from the trainer's by {gap:.3g} nats{how}"
        if base is not None and as_near_to(base):
            return gap, f"{differ}, more than from those of the model without adapters"
        # A small update moves the probe by less than the tolerance: then the engine must at least be nearer to
        # this version than to the last one.
        if not gap <= allowed or (last is not None and as_near_to(last)):
            return gap, f"{differ}; allowed are {allowed:.3g}, and less than from the last version's"
        if not self._learned:
            self._learned = True
            self.tolerance = min(allowed, max(LEAST, USUAL * gap))
            self._noise = max(self._noise, 3 * gap)
        return gap, ""
