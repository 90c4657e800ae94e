"""Finds the fastest allocation of N GPUs: GPUs per engine, engines, trainer ranks, staleness bound, concurrency.

``sizing`` estimates the memory of an allocation, and allocations that do not fit are skipped. The others are simulated
roughly (large ones at a quarter of their size), and the best of them in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from asyncrl_cli.plan.simulator import Outcome, Scenario, simulate
from asyncrl_cli.sizing.estimate import Change, estimate, excesses, with_changes
from asyncrl_cli.sizing.model import SizedModel
from asyncrl_cli.sizing.parts import Role
from asyncrl_cli.spec.sections import ExperimentSpec

ENGINE_GPUS = (1, 2, 4, 8)
TRAINER_SHARES = (0.25, 0.375, 0.5, 0.625, 0.75)
BOUNDS = (1, 2, 4)
CONCURRENCY = (1, 2)
"""Rollouts that all engines together run, as multiples of a step's rollouts."""
COARSE_STEPS, STEPS = 8, 30
"""Steps of a rough simulation, and of a full one."""
LEAST_ENGINES = 8
"""With fewer engines, the rough simulation has all of them, because a quarter of them would behave differently."""
REFINED = 5
"""Number of allocations that are simulated in full."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """GPUs per engine, numbers of engines and trainer ranks, the staleness bound, and rollouts per engine."""

    engine_gpus: int
    engines: int
    ranks: int
    max_staleness: int
    slots: int

    def change(self) -> Change:
        """Return the keys of a spec that set this allocation."""
        return {
            "rollout.gpus_per_engine": self.engine_gpus,
            "rollout.engines": self.engines,
            "trainer.ranks": self.ranks,
            "rollout.max_running_rollouts": self.slots,
            "pipeline.max_staleness": self.max_staleness,
        }

    def settings(self) -> list[str]:
        """Return the arguments of ``--set`` for this allocation."""
        return [f"{key}={value}" for key, value in self.change().items()]


@dataclass(frozen=True, slots=True)
class Candidate:
    """An allocation and its simulation."""

    allocation: Allocation
    outcome: Outcome
    trainer_memory: float | None  # share of its GPU's memory that a trainer rank takes; None if not known
    kv_tokens: int | None  # tokens that fit into an engine's cache; None if not known


@dataclass(frozen=True, slots=True)
class Found:
    best: tuple[Candidate, ...]  # the fastest first
    simulated: int
    too_large: int  # allocations that do not fit into memory


ScenarioOf = Callable[[ExperimentSpec, int | None], Scenario]
"""Makes a scenario from a spec and the number of tokens that fit into an engine's cache (None: not known)."""


def allocations(gpus: int, rollouts: int, engine_gpus: Sequence[int] = ENGINE_GPUS) -> Iterator[Allocation]:
    """Yield the allocations of ``gpus`` to try. ``rollouts``: number of rollouts in a step."""
    seen = set()
    for size in engine_gpus:
        for share in TRAINER_SHARES:
            ranks = max(1, round(share * gpus))
            engines = (gpus - ranks) // size
            if engines < 1:
                continue
            ranks = gpus - engines * size  # no GPU is left over
            for concurrency in CONCURRENCY:
                slots = max(8, -(-concurrency * rollouts // engines))
                for bound in BOUNDS:
                    allocation = Allocation(size, engines, ranks, max_staleness=bound, slots=min(1024, slots))
                    if allocation not in seen:
                        seen.add(allocation)
                        yield allocation


def search(
    spec: ExperimentSpec,
    candidates: Sequence[Allocation],
    model: SizedModel | None,
    gpu_bytes: int | None,
    scenario_of: ScenarioOf,
) -> Found:
    """Simulate the candidates that fit, if the spec can divide their ranks.

    ``model`` is None if its sizes are not known; then all candidates count as fitting.
    """
    coarse: list[tuple[float, Allocation, Scenario, float | None, int | None]] = []
    too_large = 0
    for allocation in candidates:
        if allocation.ranks % spec.trainer.sequence_parallel or allocation.ranks % spec.trainer.expert_parallel:
            continue
        own = with_changes(spec, allocation.change())
        memory: float | None = None
        kv_tokens: int | None = None
        if model is not None and gpu_bytes is not None:
            found = estimate(own, model=model, gpu_bytes=gpu_bytes, host_bytes=None)
            if any(problem.cannot for problem in excesses(own, found)):
                too_large += 1
                continue
            kv_tokens = None if found.cache is None else found.cache.tokens
            memory = next((one.total / gpu_bytes for one in found.devices if one.role is Role.TRAINER), None)
        scenario = scenario_of(own, kv_tokens)
        small = scenario.scaled(0.25) if scenario.engines >= LEAST_ENGINES and not scenario.engines % 4 else scenario
        rough = simulate(small, COARSE_STEPS, warm_up=scenario.settings.max_staleness + 2)
        coarse.append((rough.step_s, allocation, scenario, memory, kv_tokens))
    coarse.sort(key=lambda one: one[0])
    best = [
        Candidate(allocation, outcome=simulate(scenario, STEPS), trainer_memory=memory, kv_tokens=kv_tokens)
        for _, allocation, scenario, memory, kv_tokens in coarse[:REFINED]
    ]
    return Found(tuple(sorted(best, key=lambda one: one.outcome.step_s)), len(coarse), too_large)
