"""The inputs of `asyncrl plan`: a measured run, or data sheets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from asyncrl_cli.cli.output import echo
from asyncrl_cli.core.errors import ConfigError, UserError

if TYPE_CHECKING:
    from asyncrl_cli.inspect.pages import Page
    from asyncrl_cli.plan.comparison import Line
    from asyncrl_cli.plan.from_journal import Calibration
    from asyncrl_cli.plan.scenario import Planned
    from asyncrl_cli.runs.directory import RunDirectory
    from asyncrl_cli.sizing.estimate import Estimate
    from asyncrl_cli.sizing.model import SizedModel
    from asyncrl_cli.spec.sections import ExperimentSpec
    from asyncrl_cli.train.flops import Gpu

CALIBRATION_STEPS = 10
"""Steps that `--calibrate` trains after filling the buffer three times."""
ASSUMED_GROUPS = 512


@dataclass(frozen=True, slots=True)
class Assumed:
    """Assumptions without a measurement: the kind of GPU, the lengths' mean and spread, the model's config."""

    gpu: str
    mean_tokens: float | None
    spread: float
    config_folder: Path | None


@dataclass(frozen=True, slots=True)
class Source:
    """The basis of a prediction."""

    planned: Callable[[ExperimentSpec, int | None], Planned]  # from a spec and its cache's room in tokens
    engine_gpus: tuple[int, ...]  # sizes of engines with known speed
    model: SizedModel | None = None  # for the memory estimate
    gpu_bytes: int | None = None
    page: Page | None = None
    no_advice: str = ""  # why the measured run gets no advice

    def memory(self, spec: ExperimentSpec) -> Estimate | None:
        """Estimate the memory that the GPUs need; None if the model or its GPUs are not known."""
        from asyncrl_cli.sizing.estimate import estimate

        if self.model is None or self.gpu_bytes is None:
            return None
        return estimate(spec, model=self.model, gpu_bytes=self.gpu_bytes, host_bytes=None)


def measured_source(spec: ExperimentSpec, run: RunDirectory, assumed: Assumed) -> Source:
    """Use a run's measurements. Raises ``ConfigError`` if the simulation does not reproduce the run."""
    from asyncrl_cli.inspect.health import health
    from asyncrl_cli.inspect.plan_page import calibration_page
    from asyncrl_cli.inspect.resolved import resolved_spec
    from asyncrl_cli.inspect.what_if import no_advice
    from asyncrl_cli.journal.history import metrics_rows
    from asyncrl_cli.journal.queries import snapshot
    from asyncrl_cli.journal.schema import FILE
    from asyncrl_cli.orchestrator.actors import buffer_settings
    from asyncrl_cli.plan.scenario import planned_scenario
    from asyncrl_cli.spec.load import load_recorded
    from asyncrl_cli.spec.sharing import tensor_parallel

    before = load_recorded(run.path).spec
    measured = measure(run, before)
    page = calibration_page(run.run_id, measured, _reproduced(run, measured))

    def planned(own: ExperimentSpec, _: int | None) -> Planned:
        return planned_scenario(own, settings=buffer_settings(own), measured=measured, of_run=before)

    sizes = (tensor_parallel(before),)
    with snapshot(run.path / FILE) as connection:
        reason = no_advice(health(metrics_rows(connection), resolved_spec(run)))
    if not spec.rollout.gpus_per_engine:
        return Source(planned, sizes, page=page, no_advice=reason)
    model, _ = _sized(spec, assumed)
    return Source(
        planned, engine_gpus=sizes, model=model, gpu_bytes=_memory(spec, _gpu(assumed.gpu)), page=page, no_advice=reason
    )


def data_sheet_source(spec: ExperimentSpec, assumed: Assumed) -> Source:
    """Use guesses from data sheets and assumed lengths. Raises ``ConfigError`` for a spec without GPUs."""
    from asyncrl_cli.orchestrator.actors import buffer_settings
    from asyncrl_cli.plan.guess import guessed_costs, guesses, shape_of
    from asyncrl_cli.plan.lengths import LengthModel
    from asyncrl_cli.plan.scenario import Planned, scenario_of
    from asyncrl_cli.plan.search import ENGINE_GPUS

    if not spec.rollout.gpus_per_engine or not spec.trainer.gpus_per_rank:
        raise ConfigError(
            "nothing is measured, and no data sheet gives the speed of a CPU",
            location="rollout.gpus_per_engine",
            hint="measure: --calibrate here, or --calibrate-from RUN",
        )
    gpu = _gpu(assumed.gpu)
    model, config = _sized(spec, assumed)
    shape = shape_of(model, config)
    rollout = spec.rollout
    mean = assumed.mean_tokens if assumed.mean_tokens is not None else rollout.max_response_tokens / 2
    lengths = LengthModel(
        mean=min(mean, rollout.max_response_tokens),
        sigma=assumed.spread,
        cut=rollout.max_response_tokens,
        prompt=rollout.max_prompt_tokens,
    )
    groups = lengths.groups(ASSUMED_GROUPS, rollout.group_size)
    notes = (
        guesses(assumed.gpu, shape),
        f"assumed: responses have {mean:,.0f} tokens on average, with a spread of {assumed.spread}; all prompts have "
        f"the length of rollout.max_prompt_tokens",
    )

    def planned(own: ExperimentSpec, kv_tokens: int | None) -> Planned:
        costs = guessed_costs(own, shape, gpu, groups=groups, kv_tokens=kv_tokens)
        return Planned(scenario_of(own, settings=buffer_settings(own), groups=groups, costs=costs), notes)

    return Source(planned, engine_gpus=ENGINE_GPUS, model=model, gpu_bytes=_memory(spec, gpu))


def measure(run: RunDirectory, spec: ExperimentSpec) -> Calibration:
    """Read lengths and costs from a run's journal. Raises ``ConfigError`` if the journal has too few steps."""
    from asyncrl_cli.journal.queries import snapshot
    from asyncrl_cli.journal.schema import FILE
    from asyncrl_cli.plan.from_journal import calibrate
    from asyncrl_cli.plan.scenario import shares_host

    with snapshot(run.path / FILE) as connection:
        try:
            return calibrate(connection, shares_host(spec))
        except ValueError as error:
            hint = "measure a run with more trained steps, and fewer evaluations and checkpoints"
            raise ConfigError(str(error), location=run.run_id, hint=hint) from None


def calibration_run(path: Path, overrides: Sequence[str]) -> RunDirectory:
    """Train a few steps with one engine and as few trainer ranks as possible. Batches are scaled to the ranks."""
    from asyncrl_cli.cli.output import start_checks
    from asyncrl_cli.cli.running import drive
    from asyncrl_cli.orchestrator.launch import Start
    from asyncrl_cli.plan.scenario import shares_host
    from asyncrl_cli.runs.directory import RunDirectory
    from asyncrl_cli.runs.manifest import describe_start
    from asyncrl_cli.spec.load import dump_spec, load_spec
    from asyncrl_cli.system.processors import processor_speed

    spec = load_spec(path, overrides).spec
    pipeline, trainer = spec.pipeline, spec.trainer
    ranks = lcm(trainer.sequence_parallel, trainer.expert_parallel)
    steps = 3 * (pipeline.max_staleness + 2) * pipeline.publish_every + CALIBRATION_STEPS
    loaded = load_spec(
        path,
        [
            *overrides,
            "rollout.engines=1",
            f"trainer.ranks={ranks}",
            f"pipeline.groups_per_step={max(2, pipeline.groups_per_step * ranks // trainer.ranks)}",
            f"stop.steps={steps}",
            "stop.epochs=null",
            "evaluation.every=0",
            "checkpoints.every=0",
        ],
    )
    with start_checks(loaded.spec, path.absolute().parent) as checks:
        experiment = checks.experiment()
    speed = processor_speed() if shares_host(loaded.spec) else None
    run = RunDirectory.create(loaded.spec.runs_dir, f"{loaded.spec.name}-calibration")
    run.begin(dump_spec(loaded.spec, loaded.references), steps, describe_start(path, speed))
    drive(experiment, run, Start(), quiet=True)
    return run


def _reproduced(run: RunDirectory, measured: Calibration) -> tuple[Line, ...]:
    """Simulate the measured run itself. Raises ``ConfigError`` if the result differs from the measurement."""
    from asyncrl_cli.inspect.plan_page import comparison_table
    from asyncrl_cli.inspect.resolved import resolved_spec
    from asyncrl_cli.inspect.what_if import reproduced

    found = reproduced(resolved_spec(run), measured)
    if found.misfit is None:
        return found.lines
    echo("\n".join(comparison_table("its own steps", found.lines)), err=True)
    raise ConfigError(
        f"the run's own steps are not reproduced within 10 %, so nothing is predicted; "
        f"the largest difference: {found.misfit}",
        location=run.run_id,
        hint="measure a run on a machine that nothing else uses, with more steps after its lengths have settled",
    )


def _gpu(name: str) -> Gpu:
    from asyncrl_cli.train.flops import GPUS

    if name.lower() not in GPUS:
        raise typer.BadParameter(f"no data sheet for {name!r}; known: {', '.join(GPUS)}", param_hint="--gpu")
    return GPUS[name.lower()]


def _memory(spec: ExperimentSpec, gpu: Gpu) -> int:
    from asyncrl_cli.sizing.parts import GB

    known = spec.cluster.gpu_memory_gb
    return int(gpu.memory if known is None else known * GB)


def _sized(spec: ExperimentSpec, assumed: Assumed) -> tuple[SizedModel, Any]:
    """The sizes of a spec's model, and its config."""
    from asyncrl_cli.cli.memory import model_config
    from asyncrl_cli.sizing.model import size_model

    config = model_config(spec, assumed.config_folder)
    try:
        return size_model(spec, config), config
    except UserError:
        raise
    except Exception as error:  # transformers cannot build the config
        text = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"the model cannot be sized: {text}", location="model", hint="calibrate with a run of this spec"
        ) from error
