"""The fit recovers the constants with which requests and steps were simulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from asyncrl_cli.plan.costs import Costs, EngineCost
from asyncrl_cli.plan.engine_model import Sequence, SimulatedEngine
from asyncrl_cli.plan.fit import MOST_SHARED, EngineFit, RequestTiming, fit_engine, fit_trainer, nonnegative
from asyncrl_cli.plan.simulator import Simulation
from tests.plan.scenarios import COSTS, lengths, scenario, settings


class Recorded(Simulation):
    """A simulation of one engine that records what a journal would: requests, training and stalls."""

    def run_and_fit(self, shared_host: bool) -> EngineFit:
        self.requests: list[RequestTiming] = []
        self.training: list[tuple[float, float]] = []
        self.stalls: list[tuple[float, float]] = []
        self._begun: dict[int, tuple[float, Sequence]] = {}
        self.run()
        # While there are unfinished requests, batch sizes are not known.
        known_to = min((begun for begun, _ in self._begun.values()), default=self._clock_s)
        self.requests = [replace(one, fitted=one.end_time <= known_to) for one in self.requests]
        return fit_engine([self.requests], [self.stalls], self.training, shared_host)

    def _request(self, group_id: int) -> None:
        super()._request(group_id)
        self._note()

    def _engine_event(self, engine: SimulatedEngine, stamp: int) -> None:
        super()._engine_event(engine, stamp)
        self._note()

    def _load(self) -> None:
        self.stalls.append((self._clock_s, self._clock_s + self._costs.publish.stall_s))
        super()._load()

    def _beside(self, training: bool) -> None:
        if training:
            self.training.append((self._clock_s, self._clock_s))
        else:
            self.training[-1] = (self.training[-1][0], self._clock_s)
        super()._beside(training)

    def _note(self) -> None:
        running = {id(sequence): sequence for sequence in self._engines[0].running.values()}
        for key in self._begun.keys() - running.keys():
            begun, sequence = self._begun.pop(key)
            self.requests.append(RequestTiming(begun, self._clock_s, sequence.tokens_left, sequence.context))
        for key in running.keys() - self._begun.keys():
            self._begun[key] = (self._clock_s, running[key])


def recorded(engine: EngineCost, bound: int = 2) -> Recorded:
    costs: Costs = replace(COSTS, engine=engine)
    return Recorded(scenario(settings(8, bound), lengths(120, 0.6, 600), costs, slots=64), 40)


@pytest.mark.parametrize("bound", [0, 2])
def test_an_engines_constants_are_recovered(bound: int) -> None:
    found = recorded(EngineCost(0.005, 2e-4), bound).run_and_fit(shared_host=False)
    assert found.fixed_s == pytest.approx(0.005, rel=0.02)
    assert found.per_sequence_s == pytest.approx(2e-4, rel=0.02)
    assert found.beside_trainer == 0
    assert found.residual < 0.02


def test_pauses_belong_to_their_engine() -> None:
    run = recorded(EngineCost(0.005, 2e-4))
    run.run_and_fit(shared_host=False)
    # The same requests on an engine that is paused later: the constants of each engine follow from its own pauses.
    other = [replace(one, start_time=one.start_time + 0.5, end_time=one.end_time + 0.5) for one in run.requests]
    later = [(begin + 0.5, end + 0.5) for begin, end in run.stalls]
    found = fit_engine([run.requests, other], [run.stalls, later], [], shared_host=False)
    swapped = fit_engine([run.requests, other], [later, run.stalls], [], shared_host=False)
    assert found.fixed_s == pytest.approx(0.005, rel=0.02)
    assert swapped.residual > 2 * found.residual


def test_the_slowdown_during_training_is_recovered() -> None:
    found = recorded(EngineCost(0.005, 2e-4, beside_trainer=0.4)).run_and_fit(shared_host=True)
    assert found.beside_trainer == pytest.approx(0.4, rel=0.1)
    assert found.fixed_s == pytest.approx(0.005, rel=0.02)


def test_the_cost_of_contexts_is_recovered() -> None:
    found = recorded(EngineCost(0.005, 0.0, 2e-6)).run_and_fit(shared_host=False)
    assert found.per_context_token_s == pytest.approx(2e-6, rel=0.05)
    assert found.fixed_s == pytest.approx(0.005, rel=0.02)


def test_a_slowdown_beyond_half_comes_from_another_process() -> None:
    found = recorded(EngineCost(0.005, 2e-4, beside_trainer=4.0)).run_and_fit(shared_host=True)
    assert found.beside_trainer == pytest.approx(MOST_SHARED / (1 - MOST_SHARED))


def test_a_trainers_constants_are_recovered() -> None:
    tokens = [1000.0, 3000.0, 2000.0, 5000.0, 4000.0]
    found = fit_trainer([0.2 + 1e-4 * each for each in tokens], tokens)
    assert (found.per_step_s, found.per_token_s) == (pytest.approx(0.2), pytest.approx(1e-4))
    assert found.residual == pytest.approx(0, abs=1e-9)


def test_few_steps_give_one_constant() -> None:
    found = fit_trainer([0.5, 0.7], [1000.0, 2000.0])
    assert found.per_step_s == 0
    assert found.per_token_s == pytest.approx(1.2 / 3000)


def test_no_constant_is_below_0() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert list(nonnegative(columns, np.array([3.0, 2.0, 1.0]))) == [2.0, 0.0]


def test_too_few_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        fit_engine([[RequestTiming(0.0, 1.0, 10)]], [[]], [], False)
