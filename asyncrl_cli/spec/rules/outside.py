"""Rules of what lies outside the run: its folder, MLflow, and the free mappings that others read."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from importlib.metadata import entry_points

from asyncrl_cli.spec.problems import Problem
from asyncrl_cli.spec.rules.base import rule
from asyncrl_cli.spec.sections import ExperimentSpec

TRACKING_SCHEMES = (
    *("file", "sqlite", "postgresql", "mysql", "mssql"),
    *("http", "https", "databricks", "databricks-uc", "uc"),
)
"""What MLflow's tracking stores begin with; plugins of the environment add their own."""


@rule
def runs_folder(spec: ExperimentSpec) -> Iterator[Problem]:
    """`runs_dir` is a folder, or can become one."""
    for path in (spec.runs_dir, *spec.runs_dir.absolute().parents):
        if os.path.exists(path):
            if not os.path.isdir(path):
                yield Problem("runs_dir", f"{path} is a file", "name a folder")
            return


@rule
def tracking_target(spec: ExperimentSpec) -> Iterator[Problem]:
    """`tracking.uri` is one that MLflow knows, and `tracking.register_model` goes with `tracking.mlflow`."""
    tracking = spec.tracking
    scheme, separator, _ = (tracking.uri or "").partition(":")
    if separator and scheme.partition("+")[0] not in (*TRACKING_SCHEMES, *_plugin_schemes()):
        message = f"MLflow has no tracking store of scheme `{scheme}`"
        yield Problem("tracking.uri", message, f"use a path, or one of {', '.join(TRACKING_SCHEMES)}")
    if tracking.register_model is not None and not tracking.mlflow:
        message = "a model is registered in MLflow, and tracking.mlflow is false"
        yield Problem("tracking.register_model", message, "set tracking.mlflow to true, or remove this")


def _plugin_schemes() -> list[str]:
    return [entry.name for entry in entry_points(group="mlflow.tracking_store")]


@rule
def finite_values(spec: ExperimentSpec) -> Iterator[Problem]:
    """Numbers in `model.init.config`, `task.options` and `rollout.engine_args` are finite."""
    free: list[tuple[str, object]] = [
        ("model.init.config", spec.model.init.config if spec.model.init else {}),
        ("task.options", spec.task.options),
        ("rollout.engine_args", spec.rollout.engine_args),
    ]
    free += [(f"task.mix.{index}.options", member.options) for index, member in enumerate(spec.task.mix)]
    for path, value in free:
        for below in _not_finite(path, value):
            yield Problem(below, "must be a finite number", "JSON, which records the spec, has no other numbers")


def _not_finite(path: str, value: object) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path
    elif isinstance(value, (dict, list)):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _not_finite(f"{path}.{name}", inner)
