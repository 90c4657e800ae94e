"""Prompts from Hugging Face `datasets`: a folder that `save_to_disk` wrote, or a data set of the hub."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.arrow_table import ArrowPrompts
from asyncrl_cli.data.rows import RowForm
from asyncrl_cli.spec.data_sources import HUB


def read_saved(folder: Path, split: str | None, size: int | None, form: RowForm) -> ArrowPrompts:
    """The prompts of a folder that `datasets` saved. Raises ``DataError``, also when `datasets` is not installed."""
    datasets = _datasets(str(folder))
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(
            f"{folder} cannot be read: {_first_line(error)}",
            hint="name a folder that Dataset.save_to_disk or DatasetDict.save_to_disk wrote",
        ) from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            said = "has several splits" if split is None else f"has no split {split!r}"
            raise DataError(f"{folder} {said}", hint=f"set `split` to one of {', '.join(found)}")
        found = found[split]
    elif split is not None:
        raise DataError(f"{folder} has no splits, and {split!r} is asked for", hint="leave `split` out")
    return _prompts(found, str(folder), size, form)


def read_hub(path: str, config: str | None, split: str, size: int | None, form: RowForm) -> ArrowPrompts:
    """The prompts of a split of ``hf:owner/name``, from the hub or from the cache of an earlier download.

    Raises ``DataError``, also when `datasets` is not installed or there is no network.
    """
    datasets = _datasets(path)
    name, _, revision = path.removeprefix(HUB).partition("@")
    try:
        found = datasets.load_dataset(name, config, split=split, revision=revision or None)
    except Exception as error:
        raise DataError(
            f"{path} cannot be loaded: {_first_line(error)}",
            hint="check name, config and split, and that this machine reaches the hub; without a network, save the "
            "data set elsewhere with save_to_disk and name that folder",
        ) from error
    return _prompts(found, path, size, form)


def _prompts(dataset: Any, source: str, size: int | None, form: RowForm) -> ArrowPrompts:
    return ArrowPrompts(dataset.with_format("arrow")[:size], source, size, form)


def _datasets(source: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(f"{source} needs Hugging Face datasets: {error}", hint="pip install 'asyncrl[data]'") from error


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
