"""The monitors that a spec names: TensorBoard, Weights & Biases, and the user's classes.

A resumed run continues the same run in Weights & Biases. For TensorBoard it writes another file, with repeated steps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.user_code import import_named
from asyncrl_cli.inspect.health import HealthFinding
from asyncrl_cli.inspect.response_tables import ResponseRow, ResponseTable, TableId, response_tables
from asyncrl_cli.monitors.base import Ending, EvaluationResult, Monitor, RunInfo, evaluation_metrics
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import TrackingSpec, WandbSpec


def load_monitors(tracking: TrackingSpec, search_path: Path) -> list[Monitor]:
    """Make the monitors, without starting them. ``search_path``: the folder of the user's modules. Raises
    ``ConfigError`` with the spec's key if a monitor cannot be made."""
    for package, setting in (("tensorboard", tracking.tensorboard), ("wandb", tracking.wandb)):
        if setting and find_spec(package) is None:
            hint = f"pip install 'asyncrl[{package}]'"
            raise ConfigError(f"the package {package} is not installed", location=f"tracking.{package}", hint=hint)
    monitors: list[Monitor] = [TensorBoard()] if tracking.tensorboard else []
    if tracking.wandb is not None:
        netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))  # where `wandb login` stores the key
        if tracking.wandb.mode == "online" and not os.environ.get("WANDB_API_KEY") and not netrc.exists():
            raise ConfigError(  # otherwise W&B would ask for it in the terminal
                "Weights & Biases has no API key",
                location="tracking.wandb",
                hint="set WANDB_API_KEY, call `wandb login`, or set tracking.wandb.mode to offline",
            )
        monitors.append(WeightsAndBiases(tracking.wandb))
    for index, name in enumerate(tracking.monitors):
        monitors.append(_custom(name, search_path, f"tracking.monitors.{index}"))
    return monitors


def _custom(name: str, search_path: Path, location: str) -> Monitor:
    hint = "name a subclass of asyncrl_cli.monitors.base.Monitor with a constructor that needs no arguments"
    monitor_class = import_named(name, folder=search_path, location=location, hint=hint)
    if not (isinstance(monitor_class, type) and issubclass(monitor_class, Monitor)):
        raise ConfigError(
            f"{name} is not a subclass of asyncrl_cli.monitors.base.Monitor", location=location, hint=hint
        )
    try:
        return monitor_class()
    except Exception as error:
        raise ConfigError(f"{name}() failed: {type(error).__name__}: {error}", location=location, hint=hint) from error


class TensorBoard(Monitor):
    """Writes every number as a scalar to event files in the run's folder."""

    name = "TensorBoard"

    def started(self, run: RunInfo) -> None:
        from tensorboard.summary import Writer

        self._folder = run.folder / "tensorboard"
        self._writer: Any = Writer(str(self._folder))

    def stepped(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        self._write(step, {"version": version, **metrics}.items())

    def evaluated(self, result: EvaluationResult) -> None:
        self._write(result.step, evaluation_metrics(asdict(result)))

    def finish(self, ending: Ending) -> str:
        self._writer.close()
        return f"tensorboard --logdir {self._folder}"

    def _write(self, step: int, metrics: Iterable[tuple[str, float]]) -> None:
        for name, value in metrics:
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a killed run loses nothing


class WeightsAndBiases(Monitor):
    """Logs every number. The library's process uploads them, or with ``offline`` only writes to the run's folder."""

    name = "W&B"

    def __init__(self, spec: WandbSpec) -> None:
        self._spec = spec
        self._known_tables: set[TableId] = set()

    def started(self, run: RunInfo) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when the library is imported
        import wandb

        self._info, self._step = run, RunDirectory(run.folder).state.step
        is_resumed = (run.folder / "wandb").exists()
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            init_timeout=60.0,
            # The library's exit hook waits for uploads, too, and without a limit its wait is unbounded (decision 0020).
            finish_timeout=10.0,
        )
        self._run: Any = wandb.init(
            project=self._spec.project,
            entity=self._spec.entity,
            mode=self._spec.mode,
            id=run.run_id,
            name=run.run_id,
            resume="allow",
            dir=run.folder,
            config=dict(run.spec),
            settings=settings,
        )
        # W&B's own counter refuses the steps that a resumed run repeats.
        self._run.define_metric("*", step_metric="step")
        if is_resumed:  # it has logged the earlier steps' tables
            self._known_tables = {(table.name, table.step) for table in self._new_tables()}

    def stepped(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, "version": version, **metrics})
        self._step = step
        self._log_responses()

    def evaluated(self, result: EvaluationResult) -> None:
        self._run.log({"step": result.step, **dict(evaluation_metrics(asdict(result)))})

    def health(self, finding: HealthFinding) -> None:
        self._run.summary[f"health/{finding.rule}"] = finding.text

    def _log_responses(self) -> None:
        import wandb

        for table in self._new_tables():
            wandb_table = wandb.Table(columns=list(ResponseRow._fields), data=list(map(list, table.rows)))
            self._run.log({"step": table.step, f"responses/{table.name}": wandb_table})
            self._known_tables.add((table.name, table.step))

    def _new_tables(self) -> Iterator[ResponseTable]:
        return response_tables(RunDirectory(self._info.folder), self._info.spec, self._step, self._known_tables)

    def finish(self, ending: Ending) -> str:
        import wandb

        self._log_responses()
        note = str(self._run.url) if self._spec.mode == "online" else f"wandb sync {self._run.settings.sync_dir}"
        code = 0 if ending.phase == "finished" else 1
        self._run.finish(exit_code=code)
        wandb.teardown(code)  # now: the run's processes, including W&B's, are killed before its exit hook runs
        return note
