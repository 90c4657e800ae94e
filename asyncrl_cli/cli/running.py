"""`asyncrl train` and `asyncrl resume`, with their checks, header, live view and closing lines."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.cli.arguments import Overrides, RunName, RunsDir, Step, assignments
from asyncrl_cli.cli.output import debugging, echo, start_checks
from asyncrl_cli.core.errors import ConfigError, UserError
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.inspect.pages import count_range
from asyncrl_cli.runs.catalogue import find_run
from asyncrl_cli.runs.directory import MODEL, RunDirectory

if TYPE_CHECKING:
    from asyncrl_cli.checks.finding import Finding
    from asyncrl_cli.monitors.outlet import Terminal
    from asyncrl_cli.orchestrator.experiment import Experiment
    from asyncrl_cli.orchestrator.launch import DriverStart, RunResult
    from asyncrl_cli.spec.sections import ExperimentSpec

Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print only the run's id and problems.")]


def train(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="The YAML spec.")],
    overrides: Overrides = None,
    quiet: Quiet = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Make all checks of a start, print them, and start nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print the checks as JSON.")] = False,
) -> None:
    """Check the spec, start Ray, DeepSpeed and vLLM, and train to the last step.

    Exit code: 0 when the run finished; 2 when the spec cannot run here, and nothing was started; 1 when the run failed;
    130 when Ctrl-C stopped it. With --dry-run: 0 when the spec can run, 2 when it cannot.
    """
    from asyncrl_cli.spec.load import dump_spec, load_spec

    if dry_run:
        from asyncrl_cli.cli.doctor import show_findings

        if not show_findings(_findings(spec, overrides or (), as_json), "can_run", as_json):
            raise typer.Exit(2)
        return
    if as_json:
        raise typer.BadParameter("needs --dry-run", param_hint="--json")
    loaded_spec = load_spec(spec, overrides or ())
    for problem in loaded_spec.warnings:
        echo(str(problem), err=True)

    from asyncrl_cli.orchestrator.interrupts import stop_on_signals
    from asyncrl_cli.orchestrator.launch import DriverStart
    from asyncrl_cli.runs.manifest import describe_start

    with stop_on_signals():  # also between the checks and the run
        with start_checks(loaded_spec.spec, spec.absolute().parent) as checks:
            experiment = checks.experiment()
        checked_spec = experiment.spec  # with `stop.epochs` converted to steps
        # After the checks, because a refused spec must leave no folder behind (decision 0028).
        run = RunDirectory.create(checked_spec.runs_dir, checked_spec.name)
        manifest = describe_start(spec)
        run.begin(dump_spec(checked_spec, loaded_spec.references), checked_spec.stop.total, manifest)
        drive(experiment, run=run, start=DriverStart(), quiet=quiet)


def _findings(spec: Path, overrides: Sequence[str], as_json: bool) -> Iterator[Finding]:
    """Yield the spec's problems, then the start checks' findings. Raises ``SpecError`` unless ``as_json``."""
    from asyncrl_cli.checks.finding import Finding, Status
    from asyncrl_cli.spec.load import load_spec
    from asyncrl_cli.spec.problems import SpecError

    try:
        loaded_spec = load_spec(spec, overrides)
    except SpecError as error:
        if not as_json:
            raise
        problems, checked = error.problems, None
    else:
        problems, checked = loaded_spec.warnings, loaded_spec.spec
    for problem in problems:
        status = Status.FAILURE if problem.severity == "error" else Status.WARNING
        text = str(replace(problem, hint="")).removeprefix(f"{problem.severity}: ")  # the status already shows it
        yield Finding("spec", status=status, found=text, hint=problem.hint)
    if checked is not None:
        if not problems:
            yield Finding("spec", Status.OK, str(spec))
        with start_checks(checked, spec.absolute().parent, thorough=True, references=loaded_spec.references) as checks:
            yield from checks.findings()


def resume(
    run_id: RunName,
    steps: Annotated[int | None, typer.Option("--steps", metavar="STEPS", min=1, help="Train to this step.")] = None,
    step: Step = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a key that may change in a resumed run.",
            autocompletion=assignments,
        ),
    ] = None,
    without_journal: Annotated[
        bool, typer.Option("--without-journal", help="Move a damaged journal away; continue from a checkpoint.")
    ] = False,
    accept_changed_data: Annotated[
        bool, typer.Option("--accept-changed-data", help="Continue although the training data has changed.")
    ] = False,
    runs_dir: RunsDir = Path("runs"),
    quiet: Quiet = False,
) -> None:
    """Continue a run from where it stopped.

    The trainer starts from the newest checkpoint (or the initial model) and trains the batches recorded since then
    again; unfinished rollouts continue from their recorded tokens. Exit codes are the same as for `asyncrl train`.
    """
    from asyncrl_cli.orchestrator.interrupts import stop_on_signals
    from asyncrl_cli.runs.manifest import changed_versions
    from asyncrl_cli.spec.changes import check_changes, kept_horizon
    from asyncrl_cli.spec.load import dump_spec, load_recorded

    with stop_on_signals():
        with refusing():
            run = find_run(runs_dir, run_id)
            run.lock()
            if versions := changed_versions(run.manifest):  # before another version's spec or journal is refused
                echo(f"! {run.run_id} was started with {versions}: see docs/operations.md, Upgrade", err=True)
            changes = [*(overrides or ()), *([f"stop.steps={steps}"] if steps else [])]
            previous_spec = load_recorded(run.path).spec
            loaded_spec = load_recorded(run.path, changes)
            changed = check_changes(previous_spec, loaded_spec.spec, loaded_spec.references)
            horizon = kept_horizon(previous_spec, loaded_spec.spec)
            if horizon is not None:
                loaded_spec = load_recorded(run.path, [*changes, f"trainer.schedule.steps={horizon}"])
            spec = loaded_spec.spec

            from asyncrl_cli.orchestrator.resume import check_data, prepare

            plan = prepare(run, spec=spec, step=step, note=", ".join(changed), without_journal=without_journal)
            with start_checks(spec, search_path(run), takes_data=plan.takes_data) as checks:
                experiment = checks.experiment()
            check_data(run, experiment=experiment, plan=plan, accept_changed_data=accept_changed_data)
        start = plan.carry_out(run, accept_changed_data)  # until now, nothing has changed on disk
        if start.note != plan.start.note:
            echo(f"{run.run_id}: {start.note}", err=True)
        if horizon is not None:
            text = f"the learning rate's {spec.trainer.schedule.kind} schedule still spans {horizon} steps"
            echo(f"{run.run_id}: {text}; change trainer.schedule.steps to stretch it", err=True)
        run.begin(dump_spec(experiment.spec, loaded_spec.references), spec.stop.total)
        drive(experiment, run=run, start=start, quiet=quiet)


def search_path(run: RunDirectory) -> Path:
    """Return the folder of the user's modules: the folder of the spec file that started the run."""
    return Path(run.manifest.get("spec_file", run.path / "spec.yaml")).parent


@contextmanager
def refusing() -> Iterator[None]:
    """Give a ``UserError`` in this block exit code 2. The block only checks: it must not change or start anything."""
    try:
        yield
    except UserError as error:
        error.exit_code = ConfigError.exit_code
        raise


def drive(experiment: Experiment, run: RunDirectory, start: DriverStart, quiet: bool) -> None:
    """Run an experiment with header, view and closing lines; if ``quiet``, print only its id and problems."""
    from asyncrl_cli.monitors.outlet import run_terminal

    with run_terminal(run.path / "logs") as terminal:
        _drive(experiment, run, start, quiet=quiet, terminal=terminal)


def _drive(experiment: Experiment, run: RunDirectory, start: DriverStart, *, quiet: bool, terminal: Terminal) -> None:
    from asyncrl_cli.checks.memory import microbatch_text
    from asyncrl_cli.monitors.console import open_view
    from asyncrl_cli.orchestrator.interrupts import INTERRUPTED, Interrupted
    from asyncrl_cli.orchestrator.launch import run_experiment

    def show(*lines: str) -> None:
        terminal.out.write("".join(f"{line}\n" for line in lines))

    spec = experiment.spec
    pipeline = spec.pipeline
    if quiet:
        show(run.run_id)
    else:
        work = (
            f"{counted(spec.stop.total, 'step')} of {pipeline.groups_per_step} × {spec.rollout.group_size} "
            f"rollouts, {pipeline.mode}, staleness at most {pipeline.max_staleness}, "
            f"{counted(count_range(spec.rollout.min_engines, spec.rollout.max_engines), 'engine')}"
            + (f" with up to {spec.rollout.running_rollouts} rollouts" if spec.rollout.gpus_per_engine else "")
        )
        show(
            f"run      {run.run_id}",
            f"what     {work if spec.stop.total else 'supervised training'}, "
            f"{counted(spec.trainer.ranks, 'trainer rank')}, ZeRO-{spec.trainer.zero_stage}"
            + (f", {microbatch_text(spec.trainer)}" if spec.trainer.gpus_per_rank else ""),
            f"where    {_relative(run.path)}",
        )
    try:
        with open_view(run, steps=spec.stop.total, terminal=terminal, quiet=quiet) as view:
            outcome = run_experiment(experiment, run=run, console=view, start=start)
    except Interrupted:
        terminal.err.write(f"stopped at step {run.state.step}; resume with: asyncrl resume {run.argument}\n")
        raise typer.Exit(INTERRUPTED) from None
    except UserError as error:
        error.exit_code = UserError.exit_code  # exit code 2 would mean that nothing was started
        raise
    except Exception as error:
        if debugging():
            raise
        raise UserError(
            f"the run failed: {type(error).__name__}: {error}",
            location=run.run_id,
            hint=f"the logs are in {_relative(run.path / 'logs')}; --debug shows the traceback",
        ) from error
    if not quiet:
        show(summary(run, outcome, spec))


def summary(run: RunDirectory, result: RunResult, spec: ExperimentSpec) -> str:
    from asyncrl_cli.monitors.mlflow.sender import target_of
    from asyncrl_cli.runs.checkpoints import complete_checkpoints

    lines = [f"\nfinished {counted(run.state.step, 'step')} in {result.seconds:.0f} s"]
    for evaluation_kind, accuracy in sorted(run.state.accuracy.items()):
        initial_accuracy = run.state.accuracy_before.get(evaluation_kind)
        initial_text = f"{initial_accuracy:.3f} -> " if initial_accuracy is not None else ""
        lines.append(f"held-out accuracy, {evaluation_kind + ':':8} {initial_text}{accuracy:.3f}")
    checkpoints = complete_checkpoints(run.path / "checkpoints")
    results = {
        "model": _relative(run.path / MODEL),
        "checkpoint": checkpoints and _relative(checkpoints[-1].folder),
        **result.notes,
        "run folder": _relative(run.path),
    }
    lines += [f"{name:11} {value}" for name, value in results.items() if value]
    lines += [f"! {verdict}" for verdict in result.health.verdicts]
    lines += [
        "next:",
        f"  asyncrl report {run.argument} -o report.html",
        f"  asyncrl watch {run.argument}",
        f"  asyncrl inspect run {run.argument}",
    ]
    if run.state.steps and not any(finding.stops_learning for finding in result.health.open_findings):
        lines.append(f"  asyncrl resume {run.argument} --steps {2 * run.state.steps}")
    store = target_of(spec).uri
    if spec.tracking.mlflow and "://" in store and not store.startswith("http"):
        lines.append(f"  mlflow ui --backend-store-uri {shlex.quote(store)}")
    return "\n".join(lines)


def _relative(path: Path) -> str:
    """The path, relative to the working directory if it is inside."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
