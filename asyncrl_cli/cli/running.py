"""The parts that `train` and `resume` share: the header, the live view and the closing lines of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.cli.output import debugging, echo, in_runs_dir
from asyncrl_cli.core.errors import ConfigError, UserError
from asyncrl_cli.core.terminal import counted

if TYPE_CHECKING:
    from asyncrl_cli.checks.start import StartChecks
    from asyncrl_cli.monitors.outlet import Terminal
    from asyncrl_cli.orchestrator.experiment import Experiment
    from asyncrl_cli.orchestrator.launch import Outcome, Start
    from asyncrl_cli.runs.directory import RunDirectory
    from asyncrl_cli.spec.sections import ExperimentSpec

Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print only the run's id and problems.")]


def start_checks(
    spec: ExperimentSpec,
    search_path: Path,
    thorough: bool = False,
    references: Mapping[tuple[str, ...], str] | None = None,
) -> StartChecks:
    """All checks of a start. Checks that take long print a notice to standard error."""
    from asyncrl_cli.checks.start import StartChecks

    return StartChecks(spec, search_path, lambda text: echo(f"! {text}", err=True), thorough, references)


def search_path(run: RunDirectory) -> Path:
    """The folder in which the modules that a run's spec names are looked for: that of the spec file it was started
    from."""
    return Path(run.manifest.get("spec_file", run.path / "spec.yaml")).parent


@contextmanager
def refusing() -> Iterator[None]:
    """A block that only checks. A ``UserError`` in it gets exit code 2: nothing was changed or started."""
    try:
        yield
    except UserError as error:
        error.exit_code = ConfigError.exit_code
        raise


def drive(experiment: Experiment, run: RunDirectory, start: Start, quiet: bool) -> None:
    """Run an experiment with its header, view and closing lines; a ``quiet`` one prints only its id and problems."""
    from asyncrl_cli.monitors.outlet import run_terminal

    with run_terminal(run.path / "logs") as terminal:
        _drive(experiment, run, start, quiet, terminal)


def _drive(experiment: Experiment, run: RunDirectory, start: Start, quiet: bool, terminal: Terminal) -> None:
    from asyncrl_cli.inspect.pages import count_range
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
        show(
            f"run      {run.run_id}",
            f"what     {counted(spec.stop.steps, 'step')} of {pipeline.groups_per_step} × {spec.rollout.group_size} "
            f"rollouts, {pipeline.mode}, staleness at most {pipeline.max_staleness}, "
            f"{counted(count_range(spec.rollout.min_engines, spec.rollout.max_engines), 'engine')}, "
            f"{counted(spec.trainer.ranks, 'trainer rank')}, ZeRO-{spec.trainer.zero_stage}",
            f"where    {_shown(run.path)}",
        )
    try:
        with open_view(run, spec.stop.steps, terminal, quiet) as view:
            outcome = run_experiment(experiment, run, view, start)
    except Interrupted:
        terminal.err.write(f"stopped at step {run.state.step}; resume with: asyncrl resume {run.argument}\n")
        raise typer.Exit(INTERRUPTED) from None
    except UserError as error:
        error.hint = in_runs_dir(error.hint, run.path.parent)
        error.exit_code = UserError.exit_code  # 2 would mean that nothing was started
        raise
    except Exception as error:
        if debugging():
            raise
        raise UserError(
            f"the run failed: {type(error).__name__}: {error}",
            location=run.run_id,
            hint=f"the logs are in {_shown(run.path / 'logs')}; --debug shows the traceback",
        ) from error
    if not quiet:
        show(summary(run, outcome, spec))


def summary(run: RunDirectory, outcome: Outcome, spec: ExperimentSpec) -> str:
    """The closing lines of a run."""
    from asyncrl_cli.monitors.mlflow.sender import target_of

    lines = [f"\nfinished {counted(run.state.step, 'step')} in {outcome.seconds:.0f} s"]
    for kind, after in sorted(outcome.accuracy.items()):
        before = outcome.accuracy_before.get(kind)
        was = f"{before:.3f} -> " if before is not None else ""
        lines.append(f"held-out accuracy, {kind + ':':8} {was}{after:.3f}")
    results = {
        "model": outcome.model and _shown(outcome.model),
        "checkpoint": outcome.checkpoint and _shown(outcome.checkpoint),
        **outcome.notes,
        "run folder": _shown(run.path),
    }
    lines += [f"{name:11} {value}" for name, value in results.items() if value]
    lines += [
        "next:",
        f"  asyncrl report {run.argument} -o report.html",
        f"  asyncrl watch {run.argument}",
        f"  asyncrl inspect run {run.argument}",
        f"  asyncrl resume {run.argument} --steps {2 * run.state.steps}",
    ]
    store = target_of(spec).uri
    if spec.tracking.mlflow and "://" in store and not store.startswith("http"):
        lines.append(f"  mlflow ui --backend-store-uri {store}")
    return "\n".join(lines)


def _shown(path: Path) -> str:
    """The path, relative to the working directory when it is inside."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
