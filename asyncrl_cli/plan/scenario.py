"""Builds the scenario to simulate for a spec."""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.secrets import hide
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.plan.from_journal import Calibration
from asyncrl_cli.plan.lengths import truncated
from asyncrl_cli.plan.simulator import Scenario
from asyncrl_cli.records.groups import BufferSettings
from asyncrl_cli.spec.changes import flat_settings
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.spec.sharing import tensor_parallel

COMPARED = ("trainer.", "algorithm.", "task.", "rollout.")
"""Sections on which the measured times and lengths may depend."""
SIMULATED = ("trainer.ranks", "rollout.engines", "rollout.max_running_rollouts", "rollout.max_response_tokens")
"""Keys of these sections that the scenario takes into account."""


@dataclass(frozen=True, slots=True)
class PlannedScenario:
    """A scenario. Each of its ``guesses`` is a sentence about something that was not measured."""

    scenario: Scenario
    guesses: tuple[str, ...]


def shares_host(spec: ExperimentSpec) -> bool:
    """True if trainer and engines may run on the same processors, and slow each other down."""
    return spec.trainer.gpus_per_rank == 0 and spec.rollout.gpus_per_engine == 0


def planned_scenario(
    spec: ExperimentSpec, settings: BufferSettings, calibration: Calibration, measured_spec: ExperimentSpec
) -> PlannedScenario:
    """Build the scenario of a spec from the measurements of another run with the spec ``measured_spec``.

    Raises ``ConfigError`` if the specs differ in a setting on which the measured constants depend.
    """
    for name, planned_value, measured_value in (
        ("model", _architecture(spec), _architecture(measured_spec)),
        ("trainer.dtype", spec.trainer.dtype, measured_spec.trainer.dtype),
        ("rollout.dtype", spec.rollout.dtype, measured_spec.rollout.dtype),
        ("rollout.group_size", spec.rollout.group_size, measured_spec.rollout.group_size),
        ("rollout.gpus_per_engine", spec.rollout.gpus_per_engine, measured_spec.rollout.gpus_per_engine),
        ("trainer.gpus_per_rank", spec.trainer.gpus_per_rank, measured_spec.trainer.gpus_per_rank),
    ):
        if planned_value != measured_value:
            raise ConfigError(
                f"the calibration run had another {name}, so its measurements say nothing about this spec",
                location=name,
                hint="calibrate with a run of this spec: --calibrate, or --calibrate-from another run",
            )
    guesses = []
    slots = spec.rollout.running_rollouts
    if spec.rollout.max_running_rollouts == "auto":
        slots = measured_spec.rollout.running_rollouts
        guesses.append(f"an engine is assumed to run {slots} rollouts at a time, as in the measured run")
    costs, groups = calibration.costs, calibration.groups
    if spec.trainer.ranks != measured_spec.trainer.ranks:
        share = measured_spec.trainer.ranks / spec.trainer.ranks
        costs = replace(costs, trainer=replace(costs.trainer, per_token_s=costs.trainer.per_token_s * share))
        guesses.append(
            f"the trainer is assumed to be {1 / share:.3g} times as fast with {counted(spec.trainer.ranks, 'rank')} as "
            f"with the measured {measured_spec.trainer.ranks}"
        )
    planned_keys, measured_keys = flat_settings(spec), flat_settings(measured_spec)
    for key in sorted(planned_keys.keys() | measured_keys.keys()):
        planned_value, measured_value = planned_keys.get(key), measured_keys.get(key)
        if planned_value != measured_value and key.startswith(COMPARED) and not key.startswith(SIMULATED):
            values = hide(f"{key} {planned_value} as with the measured {measured_value}")
            guesses.append(f"rollouts and steps are assumed to take as long with {values}")
    if spec.rollout.min_engines != measured_spec.rollout.min_engines and shares_host(spec):
        guesses.append("engines are assumed not to slow each other down, although they are on CPUs")
    max_tokens, measured_max_tokens = spec.rollout.max_response_tokens, measured_spec.rollout.max_response_tokens
    if max_tokens < measured_max_tokens:
        groups = truncated(groups, max_tokens)
    elif max_tokens > measured_max_tokens and any(
        rollout.response >= measured_max_tokens for group in groups for rollout in group.rollouts
    ):
        guesses.append(f"rollouts that were cut at {measured_max_tokens} tokens are assumed to end there")
    scenario = Scenario(
        settings=settings,
        groups=groups,
        costs=costs,
        engines=spec.rollout.min_engines,
        slots=slots,
        weight_update=spec.pipeline.weight_update,
        partial_rollouts=spec.pipeline.partial_rollouts,
    )
    return PlannedScenario(scenario, tuple(guesses))


def _architecture(spec: ExperimentSpec) -> object:
    model = spec.model
    return (model.path, model.init, model.lora, tensor_parallel(spec))
