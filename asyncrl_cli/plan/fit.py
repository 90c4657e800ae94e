"""Constants by least squares. Pure: arrays in, constants out. Times are in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MOST_SHARED = 0.5
"""Of an engine's time beside training, what it can lose: two that share processors evenly get half of them each."""

LEAST_REQUESTS = 20
ROUNDS = 100
"""From constants to when tokens were sampled and back, at most: where batches are always about as large, a round halves
the error of the constants, and no more."""
SETTLED = 1e-5
"""Of the time of an iteration, that the last round may change."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request that an engine had from ``begun_at`` to ``ended_at``: tokens that it sampled, and those before them."""

    begun_at: float
    ended_at: float
    tokens: float
    prompt: int = 0


@dataclass(frozen=True, slots=True)
class EngineFit:
    """Constants of an engine (plan/costs.py), and the residual: the root mean square of a request's error, as a share
    of its mean duration. What a request takes beside its iterations is in ``fixed_s``."""

    fixed_s: float
    per_sequence_s: float
    per_context_token_s: float
    beside_trainer: float
    residual: float
    requests: int


@dataclass(frozen=True, slots=True)
class TrainerFit:
    """Constants of a step, and the residual as a share of its mean duration."""

    per_step_s: float
    per_token_s: float
    residual: float
    steps: int


def nonnegative(columns: Floats, target: Floats) -> Floats:
    """Least squares with coefficients of at least 0: the most negative one is omitted, until there is none."""
    kept = list(range(columns.shape[1]))
    scale = np.abs(columns).max(axis=0)
    kept = [at for at in kept if scale[at] > 0]
    found = np.zeros(columns.shape[1])
    while kept:
        solution = np.linalg.lstsq(columns[:, kept] / scale[kept], target, rcond=None)[0]
        if solution.min() >= 0:
            found[kept] = solution / scale[kept]
            break
        del kept[int(solution.argmin())]
    return found


def fit_engine(
    engines: Sequence[Sequence[Request]],
    wanted: Sequence[Sequence[bool]],
    stalls: Sequence[Sequence[tuple[float, float]]],
    training: Sequence[tuple[float, float]],
    shared_host: bool,
) -> EngineFit:
    """An engine's constants from the requests that engines had.

    A request of L tokens lasts for L iterations, each of ``fixed + per_sequence·n + per_context·C``. Over its life that
    is ``fixed·L + per_sequence·N + per_context·K``: N is what its engine sampled meanwhile, K the sum of its contexts.
    How the iterations are spread over a life depends on the constants, so that they are fitted in rounds. While
    the trainer trains on the same processors, time counts for 1/(1 + beside_trainer) of itself.

    Args:
        engines: the requests of each engine.
        wanted: which of them count; the others were there, too.
        stalls: begin and end of each engine's pauses for new weights, in which nothing is sampled.
        training: begin and end of each step's training.
        shared_host: whether trainer and engines share processors.

    Raises ``ValueError`` with too few requests.
    """
    grids = [
        _Engine(requests, counted, paused, training if shared_host else (), contexts=not shared_host)
        for requests, counted, paused in zip(engines, wanted, stalls, strict=True)
        if any(counted)
    ]
    if sum(len(grid.target) for grid in grids) < LEAST_REQUESTS:
        raise ValueError("too few engine requests are recorded")
    target = np.concatenate([grid.target for grid in grids])
    columns, found = np.concatenate([grid.columns() for grid in grids]), np.zeros(4)
    for _ in range(ROUNDS):
        before, found = found, _solve(columns, target)
        # What each constant explains of a request, on average: in units of time, they can be compared.
        if np.abs((found - before) * columns.mean(axis=0)).max() < SETTLED * target.mean():
            break
        for grid in grids:
            grid.spread(*found)
        columns = np.concatenate([grid.columns() for grid in grids])
    fixed, per_sequence, per_context, share = map(float, found)
    error = columns @ found - target
    return EngineFit(
        fixed_s=fixed,
        per_sequence_s=per_sequence,
        per_context_token_s=per_context,
        beside_trainer=share / (1 - share),
        residual=float(np.sqrt(np.mean(error**2)) / target.mean()),
        requests=len(target),
    )


def _solve(columns: Floats, target: Floats) -> Floats:
    found = nonnegative(columns, target)
    if found[-1] > MOST_SHARED:
        found = np.append(nonnegative(columns[:, :-1], target - MOST_SHARED * columns[:, -1]), MOST_SHARED)
    return found


def fit_trainer(seconds: Sequence[float], tokens: Sequence[float]) -> TrainerFit:
    """``seconds = per_step + per_token · tokens`` over steps, neither below 0.

    Raises ``ValueError`` without a step.
    """
    if not seconds:
        raise ValueError("no step is trained yet")
    target, counts = np.array(seconds, float), np.array(tokens, float)
    columns = np.stack([np.ones(len(target)), counts], 1)
    per_step, per_token = nonnegative(columns, target)
    if len(target) < 5:  # two constants from so few steps would be noise
        per_step, per_token = 0.0, target.sum() / max(1.0, counts.sum())
    error = per_step + per_token * counts - target
    return TrainerFit(float(per_step), float(per_token), float(np.sqrt(np.mean(error**2)) / target.mean()), len(target))


class _Engine:
    """The requests of an engine over the intervals between their begins and ends, in which the same ones run."""

    def __init__(
        self,
        requests: Sequence[Request],
        wanted: Sequence[bool],
        stalls: Sequence[tuple[float, float]],
        training: Sequence[tuple[float, float]],
        contexts: bool,
    ) -> None:
        """``contexts``: whether they can matter. On a CPU, in small models, they do not, and hide what does."""
        begin, end, tokens, prompt = (
            np.array([getattr(request, name) for request in requests], float)
            for name in ("begun_at", "ended_at", "tokens", "prompt")
        )
        marks = np.array([*stalls, *training], float).reshape(-1)
        marks = marks[(marks > begin.min()) & (marks < end.max())]
        self._edges = np.unique(np.concatenate([begin, end, marks]))
        self._lasting = np.diff(self._edges)
        middle = self._edges[:-1] + self._lasting / 2
        self._stalled = _inside(stalls, middle)
        self._training = _inside(training, middle)
        self._first, self._last = np.searchsorted(self._edges, begin), np.searchsorted(self._edges, end)
        self._running = self._summed(np.ones(len(begin)))
        self._prompts = self._summed(prompt)
        self._chosen = np.flatnonzero(np.array(wanted, bool))
        self._tokens = tokens[self._chosen]
        stalled = self._over_lives(self._lasting * self._stalled)
        self.target = np.maximum((end - begin)[self._chosen] - stalled, 1e-6)
        self._beside = self._over_lives(self._lasting * self._training * ~self._stalled)
        self._iterations = self._lasting * ~self._stalled  # in each interval; only their ratios matter
        self._contexts = self._prompts + self._running
        self._has_contexts = contexts

    def columns(self) -> Floats:
        """A request's iterations, sampled tokens of all, contexts, and seconds beside training."""
        own = np.maximum(self._over_lives(self._iterations), 1e-12)
        sampled = self._over_lives(self._iterations * self._running) / own
        contexts = self._over_lives(self._iterations * self._contexts) / own * self._has_contexts
        return np.stack([self._tokens, self._tokens * sampled, self._tokens * contexts, self._beside], 1)

    def spread(self, fixed: float, per_sequence: float, per_context: float, share: float) -> None:
        """The iterations of each interval, if these were the constants."""
        iteration = fixed + per_sequence * self._running + per_context * self._contexts
        beside = np.where(self._training, 1 - share, 1.0)
        self._iterations = self._lasting * ~self._stalled * beside / np.maximum(iteration, 1e-9)
        done = np.concatenate([[0.0], np.cumsum(self._iterations)])
        # A running request has sampled what was done since its begin.
        since = self._running * (done[:-1] + self._iterations / 2) - self._summed(done[self._first])
        self._contexts = self._prompts + np.maximum(since, 0.0)

    def _over_lives(self, of_intervals: Floats) -> Floats:
        sums = np.concatenate([[0.0], np.cumsum(of_intervals)])
        return np.asarray((sums[self._last] - sums[self._first])[self._chosen])

    def _summed(self, of_requests: Floats) -> Floats:
        """In each interval, the sum over those that run."""
        changes = np.zeros(len(self._edges))
        np.add.at(changes, self._first, of_requests)
        np.add.at(changes, self._last, -of_requests)
        return np.asarray(np.cumsum(changes)[:-1])


def _inside(spans: Sequence[tuple[float, float]], at: Floats) -> NDArray[np.bool_]:
    """Whether each time is in one of the spans."""
    if not spans:
        return np.zeros(len(at), bool)
    edges = np.array(sorted(spans), float)
    before = np.searchsorted(edges[:, 0], at, side="right") - 1
    return np.asarray((before >= 0) & (at < edges[np.maximum(before, 0), 1]))
