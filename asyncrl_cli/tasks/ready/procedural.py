"""The door to reasoning-gym, opened late: its import costs most of a second and it is an optional extra."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

from asyncrl_cli.core.errors import TaskError

ROWS = 2**40
"""Rows of a data set. They are computed from their index, so a task draws indices from all of this range."""


class ProceduralData(Protocol):
    """What the tasks use of a reasoning-gym data set."""

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


def procedural_data(name: str, rows: int = ROWS, **config: Any) -> ProceduralData:
    """``rows`` rows of the reasoning-gym data set ``name``.

    Raises ``TaskError`` where reasoning-gym is not installed, or where the data set does not take ``config``.
    """
    try:
        data = _reasoning_gym(name).create_dataset(name, seed=0, size=rows, **config)
    except (TypeError, AssertionError, ValueError) as error:
        raise TaskError(
            f"task.options do not fit the data set {name}: {error}",
            hint="reasoning-gym's documentation has its options",
        ) from error
    return cast("ProceduralData", data)


def data_set_names(task: str) -> list[str]:
    """The data sets that reasoning-gym has. Raises ``TaskError`` where it is not installed, naming the ``task``."""
    _reasoning_gym(task)
    return list(importlib.import_module("reasoning_gym.factory").DATASETS)


def _reasoning_gym(task: str) -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise TaskError(f"the task {task} needs reasoning-gym: {error}", hint="pip install 'asyncrl[gym]'") from error


def verified(data: ProceduralData, answer: str, fields: Mapping[str, Any]) -> float:
    """1.0 if the data set's own verifier gives ``answer`` the full score, else 0.0; partial credit counts as wrong."""
    return 1.0 if data.score_answer(answer, dict(fields)) >= 1.0 else 0.0
