"""Fits the constants of engines and trainer by least squares. Pure. Times are in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MOST_SHARED = 0.5
"""Largest share of its time that an engine can lose while the trainer trains: if both compete evenly for processors,
each gets half of them."""

LEAST_REQUESTS = 20
ROUNDS = 100
"""Largest number of rounds of ``fit_engine``. If the number of running requests hardly changes, a round only halves the
error of the constants."""
SETTLED = 1e-5
"""Fitting ends when a round has changed a request's time by less than this share."""


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """A request on an engine from ``start_time`` to ``end_time``, with its sampled tokens and its prompt's tokens.

    ``fitted``: constants are fitted to its duration. Other requests only ran at the same time.
    """

    start_time: float
    end_time: float
    tokens: float
    prompt: int = 0
    fitted: bool = True


@dataclass(frozen=True, slots=True)
class EngineFit:
    """Constants of an engine (plan/costs.py), fitted to ``requests`` requests.

    ``residual``: root mean square error of their durations, as a share of the mean duration. ``fixed_s`` includes a
    request's time outside its iterations.
    """

    fixed_s: float
    per_sequence_s: float
    per_context_token_s: float
    beside_trainer: float
    residual: float
    requests: int


@dataclass(frozen=True, slots=True)
class TrainerFit:
    """Constants of a step, fitted to ``steps`` steps. ``residual``: as in ``EngineFit``."""

    per_step_s: float
    per_token_s: float
    residual: float
    steps: int


def nonnegative(columns: Floats, target: Floats) -> Floats:
    """Solve least squares with coefficients of at least 0: drop the most negative coefficient until none is left."""
    used_columns = list(range(columns.shape[1]))
    scale = np.abs(columns).max(axis=0)
    used_columns = [column for column in used_columns if scale[column] > 0]
    coefficients = np.zeros(columns.shape[1])
    while used_columns:
        solution = np.linalg.lstsq(columns[:, used_columns] / scale[used_columns], target, rcond=None)[0]
        if solution.min() >= 0:
            coefficients[used_columns] = solution / scale[used_columns]
            break
        del used_columns[int(solution.argmin())]
    return coefficients


def fit_engine(
    engines: Sequence[Sequence[RequestTiming]],
    stalls: Sequence[Sequence[tuple[float, float]]],
    training: Sequence[tuple[float, float]],
    shared_host: bool,
) -> EngineFit:
    """Fit an engine's constants to recorded requests.

    A request of L tokens lasts for L iterations of ``fixed + per_sequence·n + per_context·C`` each. Its duration is
    ``fixed·L + per_sequence·N + per_context·K``: N is the number of tokens that its engine sampled in this time, and K
    the sum of the engine's contexts over these iterations. The times of iterations depend on the constants, so they are
    fitted in rounds. While the trainer trains on the same processors, time counts only 1/(1 + beside_trainer).

    Args:
        engines: the requests of each engine.
        stalls: begin and end of each engine's pauses for new weights.
        training: begin and end of each step's training.
        shared_host: trainer and engines share processors.

    Raises ``ValueError`` with too few requests.
    """
    grids = [
        _Engine(requests, paused, training if shared_host else (), contexts=not shared_host)
        for requests, paused in zip(engines, stalls, strict=True)
        if any(request.fitted for request in requests)
    ]
    if sum(len(grid.target) for grid in grids) < LEAST_REQUESTS:
        raise ValueError("too few engine requests are recorded")
    target = np.concatenate([grid.target for grid in grids])
    columns, constants = np.concatenate([grid.columns() for grid in grids]), np.zeros(4)
    for _ in range(ROUNDS):
        previous_constants, constants = constants, _solve(columns, target)
        # Compare changes as the time that each constant explains in an average request: all are then in seconds.
        if np.abs((constants - previous_constants) * columns.mean(axis=0)).max() < SETTLED * target.mean():
            break
        for grid in grids:
            grid.spread(*constants)
        columns = np.concatenate([grid.columns() for grid in grids])
    fixed, per_sequence, per_context, share = map(float, constants)
    error = columns @ constants - target
    return EngineFit(
        fixed_s=fixed,
        per_sequence_s=per_sequence,
        per_context_token_s=per_context,
        beside_trainer=share / (1 - share),
        residual=float(np.sqrt(np.mean(error**2)) / target.mean()),
        requests=len(target),
    )


def _solve(columns: Floats, target: Floats) -> Floats:
    constants = nonnegative(columns, target)
    if constants[-1] > MOST_SHARED:
        constants = np.append(nonnegative(columns[:, :-1], target - MOST_SHARED * columns[:, -1]), MOST_SHARED)
    return constants


def fit_trainer(seconds: Sequence[float], tokens: Sequence[float]) -> TrainerFit:
    """Fit ``seconds = per_step + per_token · tokens``, with both constants at least 0.

    Raises ``ValueError`` without a step.
    """
    if not seconds:
        raise ValueError("no step is trained yet")
    target, counts = np.array(seconds, float), np.array(tokens, float)
    columns = np.stack([np.ones(len(target)), counts], 1)
    per_step, per_token = nonnegative(columns, target)
    if len(target) < 5:  # too few steps for two constants
        per_step, per_token = 0.0, target.sum() / max(1.0, counts.sum())
    error = per_step + per_token * counts - target
    return TrainerFit(
        float(per_step),
        per_token_s=float(per_token),
        residual=float(np.sqrt(np.mean(error**2)) / target.mean()),
        steps=len(target),
    )


class _Engine:
    """An engine's requests over time, in intervals during which the same requests run."""

    def __init__(
        self,
        requests: Sequence[RequestTiming],
        stalls: Sequence[tuple[float, float]],
        training: Sequence[tuple[float, float]],
        contexts: bool,
    ) -> None:
        """``contexts``: fit the cost of contexts, too. For small models on a CPU it is near 0, and fitting it would
        make the other constants less certain."""
        begin, end, tokens, prompt = (
            np.array([getattr(request, name) for request in requests], float)
            for name in ("start_time", "end_time", "tokens", "prompt")
        )
        marks = np.array([*stalls, *training], float).reshape(-1)
        marks = marks[(marks > begin.min()) & (marks < end.max())]
        self._edges = np.unique(np.concatenate([begin, end, marks]))
        self._durations = np.diff(self._edges)
        middle = self._edges[:-1] + self._durations / 2
        self._stalled = _inside(stalls, middle)
        self._training = _inside(training, middle)
        self._first_interval, self._end_interval = (
            np.searchsorted(self._edges, begin),
            np.searchsorted(self._edges, end),
        )
        self._running = self._summed(np.ones(len(begin)))
        self._prompts = self._summed(prompt)
        self._fitted_requests = np.flatnonzero([request.fitted for request in requests])
        self._tokens = tokens[self._fitted_requests]
        stalled = self._over_lives(self._durations * self._stalled)
        self.target = np.maximum((end - begin)[self._fitted_requests] - stalled, 1e-6)
        self._beside = self._over_lives(self._durations * self._training * ~self._stalled)
        self._iterations = self._durations * ~self._stalled  # in each interval; only their ratios matter
        self._contexts = self._prompts + self._running
        self._has_contexts = contexts

    def columns(self) -> Floats:
        """For each fitted request: its iterations, the tokens that all requests sampled during them, the sum of their
        contexts over these iterations, and the seconds during which the trainer trained."""
        own_iterations = np.maximum(self._over_lives(self._iterations), 1e-12)
        sampled = self._over_lives(self._iterations * self._running) / own_iterations
        contexts = self._over_lives(self._iterations * self._contexts) / own_iterations * self._has_contexts
        return np.stack([self._tokens, self._tokens * sampled, self._tokens * contexts, self._beside], 1)

    def spread(self, fixed: float, per_sequence: float, per_context: float, share: float) -> None:
        """Compute each interval's number of iterations from these constants, and then the contexts."""
        iteration = fixed + per_sequence * self._running + per_context * self._contexts
        beside = np.where(self._training, 1 - share, 1.0)
        self._iterations = self._durations * ~self._stalled * beside / np.maximum(iteration, 1e-9)
        iterations_before = np.concatenate([[0.0], np.cumsum(self._iterations)])
        # A running request has sampled one token in each iteration since its begin.
        since = self._running * (iterations_before[:-1] + self._iterations / 2) - self._summed(
            iterations_before[self._first_interval]
        )
        self._contexts = self._prompts + np.maximum(since, 0.0)

    def _over_lives(self, of_intervals: Floats) -> Floats:
        sums = np.concatenate([[0.0], np.cumsum(of_intervals)])
        return np.asarray((sums[self._end_interval] - sums[self._first_interval])[self._fitted_requests])

    def _summed(self, of_requests: Floats) -> Floats:
        changes = np.zeros(len(self._edges))
        np.add.at(changes, self._first_interval, of_requests)
        np.add.at(changes, self._end_interval, -of_requests)
        return np.asarray(np.cumsum(changes)[:-1])


def _inside(spans: Sequence[tuple[float, float]], times: Floats) -> NDArray[np.bool_]:
    if not spans:
        return np.zeros(len(times), bool)
    edges = np.array(sorted(spans), float)
    span_indices = np.searchsorted(edges[:, 0], times, side="right") - 1
    return np.asarray((span_indices >= 0) & (times < edges[np.maximum(span_indices, 0), 1]))
