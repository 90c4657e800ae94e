"""`asyncrl evaluate`: a model's accuracy, without training."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from asyncrl_cli.cli.arguments import AsJson, NewRunsDir, Overrides, Step, run_names
from asyncrl_cli.cli.output import echo, echo_json, start_checks
from asyncrl_cli.cli.running import refusing, search_path
from asyncrl_cli.cli.serve import initial_model, is_spec
from asyncrl_cli.core.errors import ConfigError, RunError
from asyncrl_cli.inspect.pages import table
from asyncrl_cli.runs.catalogue import find_run
from asyncrl_cli.runs.directory import DEFAULT_RUNS, RunDirectory

if TYPE_CHECKING:
    from asyncrl_cli.orchestrator.evaluation import Evaluation
    from asyncrl_cli.orchestrator.experiment import Experiment
    from asyncrl_cli.orchestrator.offline import Choose
    from asyncrl_cli.orchestrator.serving import Served
    from asyncrl_cli.spec.load import LoadedSpec


class TargetSpec(NamedTuple):
    """The spec with which a target is evaluated, the folder of the user's modules, and the run if the target is one."""

    loaded: LoadedSpec
    modules: Path
    run: RunDirectory | None


class EvaluationRun(NamedTuple):
    """The first lines of the evaluations' files, each with its ``file`` (None if it could not be written), and a text
    about MLflow."""

    heads: list[dict[str, Any]]
    mlflow: str


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|SPEC|MODEL",
            help="A run, a YAML spec (its initial model), or a saved model's folder.",
            autocompletion=run_names,
        ),
    ],
    spec: Annotated[
        Path | None, typer.Option("--spec", metavar="SPEC", help="For a model's folder: a spec with task and data.")
    ] = None,
    step: Step = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="PATH", help="Evaluate on these prompts instead of data.eval.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", metavar="K", min=1, help="Sample K responses per prompt: pass@1 to K.")
    ] = None,
    greedy: Annotated[
        bool | None, typer.Option("--greedy/--sampled", help="How to generate. Default: as in the spec.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    runs_dir: NewRunsDir = None,
) -> None:
    """Evaluate a model with the engines, the task and the data of a spec, without training.

    For a run, this is its final model, or its newest checkpoint if it has not finished. The responses are written to
    the run's folder `evaluations`, or without a run to a new folder in `RUNS_DIR/evaluate`. Exit code: 2 when nothing
    was started, 1 when the evaluation failed or no response got a reward, 130 after Ctrl-C.
    """
    if samples is not None and greedy:
        raise typer.BadParameter("there is only one greedy response per prompt", param_hint="--samples")
    with refusing():
        changes = [*(overrides or ()), *(() if samples is None else (f"evaluation.samples={samples}",))]
        loaded_spec, modules, run = _read_target(target, spec_file=spec, data=data, changes=changes, runs_dir=runs_dir)
        settings = loaded_spec.spec
        if step is not None and run is None:
            raise typer.BadParameter("only a run has steps", param_hint="--step")
        evaluation_kind = "greedy" if greedy else None if greedy is None and samples is None else "sampled"
        set_changes: dict[str, Any] = {"samples": samples} if samples else {}
        if evaluation_kind is not None:
            set_changes["greedy"] = evaluation_kind == "greedy"
        evaluation = settings.evaluation
        sets = {
            name: section.model_copy(update=set_changes) for name, section in evaluation.sets.items() if data is None
        }
        settings = settings.model_copy(update={"evaluation": evaluation.model_copy(update={"sets": sets})})
        if settings.data.eval is None and not settings.evaluation.sets:
            raise ConfigError(
                "there are no prompts to evaluate on: data.eval is null, and there are no evaluation.sets",
                location=target,
                hint="name a file: --data PATH, or --set data.eval.path=PATH and other keys of data.eval",
            )

        from asyncrl_cli.orchestrator.offline import offline
        from asyncrl_cli.orchestrator.serving import served_folder, served_run, without_training

        if run is not None:
            served = served_run(run, settings, step, "evaluate")
        checked = without_training(settings if run is None else served.spec)
        with start_checks(checked, modules, training=False) as checks:
            experiment = checks.experiment()
        folder = run
        if folder is None:
            from asyncrl_cli.runs.manifest import EVALUATED, describe_start
            from asyncrl_cli.spec.load import dump_spec

            settings = settings.model_copy(update={"rollout": experiment.spec.rollout})
            model = initial_model(settings)
            # MLflow needs the form of a run's folder. It must not be in `runs`, where it would be listed as a run.
            folder = RunDirectory.create((runs_dir or settings.runs_dir) / "evaluate", settings.name)
            manifest = describe_start(modules / "spec.yaml") | {EVALUATED: target}
            folder.begin(dump_spec(settings, loaded_spec.references), 0, manifest)
            served = served_folder(settings, model, logs=folder.path / "logs", description=f"the model of {target}")
    choose = partial(offline, sampling=evaluation_kind, data=_name(data or ""))
    heads, mlflow = _run(experiment, served, choose, folder=folder, is_new=run is None)
    if as_json:
        echo_json({"model": served.description, "step": served.step, "evaluations": heads, "mlflow": mlflow or None})
    else:
        for line in (*_result_table(heads), *(head["file"] for head in heads if head["file"])):
            echo(line)
        if mlflow:
            echo(f"MLflow: {mlflow}")
    if any(head["accuracy"] is None for head in heads):
        raise typer.Exit(1)


def _read_target(
    target: str, *, spec_file: Path | None, data: str | None, changes: Sequence[str], runs_dir: Path | None
) -> TargetSpec:
    from asyncrl_cli.orchestrator.serving import saved_model
    from asyncrl_cli.spec.load import load_recorded, load_spec

    folder = Path(target)
    model = run = owner = None
    if is_spec(target):
        if spec_file is not None:
            raise typer.BadParameter(f"{target} is a spec already", param_hint="--spec")
        spec_file = folder
    elif spec_file is not None or (folder / "config.json").is_file():
        model = str(folder.absolute()) if folder.is_dir() else target
        runs = (parent for parent in Path(model).parents if (parent / "manifest.json").is_file())
        owner = next(map(RunDirectory, runs), None)
    else:
        run = owner = find_run(runs_dir or DEFAULT_RUNS, target)
    if spec_file is not None:
        load, modules = partial(load_spec, spec_file), spec_file.absolute().parent
    elif owner is not None:
        load, modules = partial(load_recorded, owner.path), search_path(owner)
    else:
        hint = f"name the spec that has them: asyncrl evaluate {target} --spec SPEC"
        raise ConfigError("a saved model has no task and no data", location=target, hint=hint)
    loaded_spec = load(changes)
    if data is not None:
        # Other prompts, but the same columns, template and system message.
        split = loaded_spec.spec.data.eval
        prompt_source = split if split is not None and split.path else loaded_spec.spec.data.train
        row_format = prompt_source.model_dump(exclude={"path", "size", "config", "split"})
        loaded_spec = load([f"data.eval={json.dumps({'path': data, **row_format})}", *changes])
    if model is not None:
        loaded_spec = replace(loaded_spec, spec=saved_model(loaded_spec.spec, model))
    return TargetSpec(loaded_spec, modules, run)


def _name(data: str) -> str:
    """Name an evaluation after the file of its prompts."""
    return re.sub(r"\W+", "_", Path(data).stem.rpartition(":")[2])[:32]


def _run(
    experiment: Experiment, served: Served, choose: Choose, *, folder: RunDirectory, is_new: bool
) -> EvaluationRun:
    from asyncrl_cli.checks.hosts import check_cluster
    from asyncrl_cli.monitors.mlflow.sender import send_rest, target_of
    from asyncrl_cli.monitors.outlet import run_terminal
    from asyncrl_cli.orchestrator.cluster import Actors
    from asyncrl_cli.orchestrator.interrupts import INTERRUPTED, Interrupted
    from asyncrl_cli.orchestrator.offline import evaluate as run_evaluation
    from asyncrl_cli.orchestrator.offline import store

    spec = experiment.spec
    heads: list[dict[str, Any]] = []
    mlflow = ""
    with run_terminal(served.logs) as terminal:

        def show(line: str) -> None:
            """Replace the progress line."""
            if terminal.err.isatty():
                terminal.err.draw(f"\r\x1b[K{line}")

        def say(text: str) -> None:
            show("")
            terminal.err.write(f"{text}\n")

        def record(evaluation: Evaluation) -> None:
            file = None
            if evaluation.warning:
                say(f"! {evaluation.warning}")
            try:
                file = str(store(folder, evaluation))
            except OSError as error:
                say(f"! {folder.path / evaluation.file} cannot be written: {error.strerror}")
            heads.append(json.loads(evaluation.text.partition("\n")[0]) | {"file": file})

        def progress(ended_responses: int, total: int) -> None:
            show(f"{ended_responses:,} of {total:,} responses")

        say(f"evaluating {served.description}")
        check_cluster(spec, actors=Actors(spec.rollout.min_engines, 0), folder=served.logs, notice=say)
        try:
            run_evaluation(experiment, served, choose, record=record, progress=progress, say=say)
        except Interrupted:
            say("stopped")
            raise typer.Exit(INTERRUPTED) from None
        show("")
        if is_new:
            folder.update(phase="finished")
            folder.unlock()
        if spec.tracking.mlflow and folder.is_driven:
            mlflow = "the run sends the evaluation"
        elif spec.tracking.mlflow:
            try:
                folder.lock()
                sender = send_rest(folder, target_of(spec))
                mlflow = f"run {sender.progress.run_id} in experiment {spec.tracking.experiment}"
            except RunError as error:
                say(f"! {error}")
            finally:
                folder.unlock()
    return EvaluationRun(sorted(heads, key=lambda head: head["kind"]), mlflow)


def _result_table(heads: Sequence[dict[str, Any]]) -> list[str]:
    """A table with the evaluations' results and 95 % confidence intervals."""
    from asyncrl_cli.monitors.base import evaluation_metrics

    rows = []
    for head in heads:
        for name, value in evaluation_metrics(head):
            measure = name[len(f"eval/{head['kind']}_") :]
            low, high = head.get("intervals", {}).get(measure.replace("reward_mean", "mean_reward"), (None, None))
            interval = "" if low is None else f"{low:.3f} to {high:.3f}"
            rows.append((head["kind"], f"{head['prompts']:,}", measure, f"{value:.3f}", interval))
    return table(("evaluation", "prompts", "measure", "value", "95 % interval"), rows, left_aligned=(0, 2))
