"""`asyncrl plan`: predicts the step time of a spec. Needs no GPU; only `--calibrate` starts processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.cli.arguments import AsJson, Overrides, RunsDir, run_names
from asyncrl_cli.cli.output import echo, echo_json

if TYPE_CHECKING:
    from asyncrl_cli.cli.plan_sources import Source
    from asyncrl_cli.inspect.pages import Page
    from asyncrl_cli.runs.directory import RunDirectory
    from asyncrl_cli.spec.sections import ExperimentSpec

SPREAD = 0.6
"""Default standard deviation of the logarithm of response lengths, if no run is measured."""


def plan(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="The YAML spec.")],
    overrides: Overrides = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure here: train a few steps with one engine and the fewest ranks.")
    ] = False,
    calibrate_from: Annotated[
        str | None,
        typer.Option(
            "--calibrate-from",
            metavar="RUN",
            help="Use the speeds and lengths that this run measured.",
            autocompletion=run_names,
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Compare splits of --gpus, staleness bounds and concurrency.")
    ] = False,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", min=2, help="With --search: GPUs to split.")
    ] = None,
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="KIND", help="Without a measurement: use this GPU's data sheet.")
    ] = "h100",
    mean_tokens: Annotated[
        float | None,
        typer.Option(
            "--mean-tokens",
            metavar="N",
            min=1,
            help="Without a measurement: mean response length in tokens. Default: half of rollout.max_response_tokens.",
            show_default=False,
        ),
    ] = None,
    spread: Annotated[
        float,
        typer.Option(
            "--spread",
            metavar="SIGMA",
            min=0,
            max=3,
            help="Without a measurement: standard deviation of the logarithm of the length.",
        ),
    ] = SPREAD,
    model_config: Annotated[
        Path | None,
        typer.Option(
            "--model-config",
            metavar="FOLDER",
            help="The folder of the model's config.json. Default: found by its name.",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="RUN",
            help="Print the prediction next to this run's measurements.",
            autocompletion=run_names,
        ),
    ] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Predict a spec's step time, the waiting time on each side, and the groups' staleness.

    The simulation uses the same ledger as a real run (docs/planning.md). Speeds and lengths come from a run
    (--calibrate, --calibrate-from), or are estimated from data sheets. Exit code: 0 with a prediction; 2 when there is
    nothing to predict from, or when the simulation does not reproduce the measured run within 10 %.
    """
    from asyncrl_cli.cli.plan_sources import Assumed, calibration_run, data_sheet_source, measured_source
    from asyncrl_cli.runs.catalogue import find_run
    from asyncrl_cli.spec.load import load_spec

    if calibrate and calibrate_from is not None:
        raise typer.BadParameter("cannot be combined with --calibrate-from", param_hint="--calibrate")
    if search is (gpus is None):
        raise typer.BadParameter("--search and --gpus belong together", param_hint="--search")
    loaded = load_spec(spec, overrides or ()).spec
    # Before measuring: a wrong run id must be reported first.
    compared = find_run(runs_dir, compare) if compare is not None else None
    run = find_run(runs_dir, calibrate_from) if calibrate_from is not None else None
    if calibrate:
        run = calibration_run(spec, overrides or ())
    assumed = Assumed(gpu, mean_tokens=mean_tokens, spread=spread, config_folder=model_config)
    source = measured_source(loaded, run, assumed) if run is not None else data_sheet_source(loaded, assumed)
    pages = {} if source.page is None else {"calibration": source.page}
    if gpus is not None:
        pages["search"] = _searched(loaded, source, gpus)
    else:
        pages |= _predicted(loaded, source=source, calibration=run, run=compared)
    if as_json:
        echo_json({name: page.document for name, page in pages.items()})
    else:
        echo("\n\n".join("\n".join(page.lines) for page in pages.values()))


def _predicted(
    spec: ExperimentSpec, source: Source, calibration: RunDirectory | None, run: RunDirectory | None
) -> dict[str, Page]:
    """The prediction, the machine's speed since the ``calibration``, and a comparison with ``run``'s measurements."""
    from asyncrl_cli.cli.plan_sources import measure
    from asyncrl_cli.inspect.plan_page import comparison_page, machine_page, plan_page
    from asyncrl_cli.plan.comparison import compare, error_parts
    from asyncrl_cli.plan.prediction import Devices, predict, spans
    from asyncrl_cli.plan.scenario import shares_host
    from asyncrl_cli.runs.manifest import SPEED
    from asyncrl_cli.sizing.parts import Role
    from asyncrl_cli.spec.load import load_recorded
    from asyncrl_cli.system.processors import processor_speed

    memory = source.memory(spec)
    planned = source.planned(spec, memory.cache.tokens if memory and memory.cache else None)
    gpus = [device for device in memory.devices if device.role is not Role.HOST] if memory else []
    devices = Devices.of(spec.rollout.gpus_per_engine, spec.trainer.gpus_per_rank, spec.trainer.ranks)
    predicted = predict(planned.scenario, spec.rollout.max_response_tokens, devices)
    by_length = spans(planned.scenario, spec.rollout.max_response_tokens)
    page = plan_page(
        spec.name,
        predicted=predicted,
        by_length=by_length,
        planned=planned,
        memory=gpus,
        reason=source.no_advice,
    )
    pages = {"plan": page}
    if calibration is not None and shares_host(spec):
        # A run to compare with recorded the machine's speed when it started.
        now = processor_speed() if run is None else run.manifest.get(SPEED)
        pages["machine"] = machine_page(calibration, now, predicted.outcome.step_s)
    if run is not None:
        happened = measure(run, load_recorded(run.path).spec)
        parts = error_parts(planned.scenario, happened)
        lines = compare(predicted.outcome, happened.observed)
        pages["comparison"] = comparison_page(
            run.run_id, lines=lines, parts=parts, own_s=predicted.outcome.step_s + parts["together"]
        )
    return pages


def _searched(spec: ExperimentSpec, source: Source, gpus: int) -> Page:
    from asyncrl_cli.core.errors import ConfigError
    from asyncrl_cli.inspect.plan_page import search_page
    from asyncrl_cli.plan.search import allocations, search

    if not spec.rollout.gpus_per_engine or not spec.trainer.gpus_per_rank:
        raise ConfigError(
            "the spec uses no GPUs, so there is nothing to split",
            location="rollout.gpus_per_engine",
            hint="set rollout.gpus_per_engine and trainer.gpus_per_rank to 1",
        )
    rollouts = spec.pipeline.groups_per_step * spec.rollout.group_size
    found = search(
        spec,
        candidates=list(allocations(gpus, rollouts, source.engine_gpus)),
        model=source.model,
        gpu_bytes=source.gpu_bytes,
        scenario_of=lambda own, kv_tokens: source.planned(own, kv_tokens).scenario,
    )
    if not found.best:
        raise ConfigError(
            f"none of {found.too_large} allocations fits into the memory of {gpus} GPUs",
            location="--gpus",
            hint="`asyncrl validate-spec --memory` shows what takes the memory",
        )
    return search_page(gpus, found, source.planned(spec, None).guesses, source.no_advice)
