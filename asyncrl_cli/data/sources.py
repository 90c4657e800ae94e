"""Opens the source of a split's prompts, of any kind (``spec.data_sources``): text files and Parquet, data sets of
Hugging Face, and functions of the user's."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.core.user_code import import_named
from asyncrl_cli.data.arrow_table import ArrowPrompts, read_parquet
from asyncrl_cli.data.rows import RowForm, collect, kind
from asyncrl_cli.data.text_files import line_of, read_csv, read_jsonl
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.data_sources import HUB, SUFFIXES, kind_of
from asyncrl_cli.spec.inputs import SplitSpec

MOST_ROWS = 5_000_000
"""A function that yields more rows than this, without a size, is taken for endless."""


def read_source(
    spec: SplitSpec, split: str, base: Path, check: Callable[[Prompt], None] | None = None
) -> Sequence[Prompt]:
    """The prompts of a split that has a ``path``; relative paths and modules start from ``base``.

    A function gets ``split``; ``check`` is the task's check of each prompt. Raises ``DataError``.
    """
    assert spec.path is not None
    form = _form_of(spec, check)
    path = base / Path(spec.path).expanduser()
    match kind_of(spec.path):
        case "hub":
            return _read_hub(spec.path, spec.config, spec.split or "train", spec.size, form)
        case "function":
            return _read_function(spec.path, base, split, spec.size, form)
        case "parquet":
            return read_parquet(path, spec.size, form)
        case "csv":
            return read_csv(path, spec.size, form)
        case "saved":
            return _read_saved(path, spec.split, spec.size, form)
        case "jsonl":
            return read_jsonl(path, spec.size, form)
        case None:
            suffixes = ", ".join(filter(None, SUFFIXES))
            raise DataError("unknown kind of file", location=str(path), hint=f"give it one of the suffixes {suffixes}")


def row_location(spec: SplitSpec, base: Path, key: str, row: int) -> str:
    """Where row number ``row`` (from 0) of a split lies, for messages: file and line, else the source and the row
    (from 1). ``key``: the split's key in the spec, for prompts that a task makes."""
    if spec.path is None:
        return f"{key}:{row + 1}"
    path = base / Path(spec.path).expanduser()
    if kind_of(spec.path) not in ("csv", "jsonl"):
        return f"{path if path.exists() else spec.path}:{row + 1}"
    return f"{path}:{line_of(path, row, _form_of(spec))}"


def _form_of(spec: SplitSpec, check: Callable[[Prompt], None] | None = None) -> RowForm:
    return RowForm(spec.prompt_column, spec.uid_column, spec.template, spec.system, check)


def _read_saved(folder: Path, split: str | None, size: int | None, form: RowForm) -> ArrowPrompts:
    """The prompts of a folder that `datasets` saved."""
    location = str(folder)
    datasets = _datasets(location)
    try:
        found = datasets.load_from_disk(location)
    except Exception as error:
        hint = "name a folder that Dataset.save_to_disk or DatasetDict.save_to_disk wrote"
        raise DataError(f"cannot be read: {_first_line(error)}", location=location, hint=hint) from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            fault = "the data set has several splits" if split is None else f"no split {split!r}"
            raise DataError(fault, location=location, hint=f"set `split` to one of {', '.join(found)}")
        found = found[split]
    elif split is not None:
        raise DataError(f"no split {split!r}: the data set has no splits", location=location, hint="remove `split`")
    return _arrow(found, location, size, form)


def _read_hub(path: str, config: str | None, split: str, size: int | None, form: RowForm) -> ArrowPrompts:
    """The prompts of a split of ``hf:owner/name``, from the hub or from the cache of an earlier download."""
    datasets = _datasets(path)
    name, _, revision = path.removeprefix(HUB).partition("@")
    try:
        found = datasets.load_dataset(name, config, split=split, revision=revision or None)
    except Exception as error:
        raise DataError(
            f"cannot be loaded: {_first_line(error)}",
            location=path,
            hint="check name, config, split and the network; without one, name a folder that save_to_disk wrote",
        ) from error
    return _arrow(found, path, size, form)


def _arrow(dataset: Any, source: str, size: int | None, form: RowForm) -> ArrowPrompts:
    mapped = [file["filename"] for file in dataset.cache_files]
    return ArrowPrompts(dataset.with_format("arrow")[:size], source, size, form, mapped)


def _datasets(source: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        fault = f"needs Hugging Face datasets: {error}"
        raise DataError(fault, location=source, hint="pip install 'asyncrl[data]'") from error


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _read_function(target: str, base: Path, split: str, size: int | None, form: RowForm) -> list[Prompt]:
    """The first ``size`` prompts that ``target(split, size)`` yields (all of them by default), as mappings or
    ``Prompt``s. It yields the same ones at every call: a run that is resumed calls it again."""
    function = _function(target, base)
    try:
        rows = function(split, size)
        if not isinstance(rows, Iterable):
            hint = "yield one mapping or Prompt per row"
            raise DataError(f"the function returned {kind(rows)}", location=target, hint=hint)
        return collect(_function_rows(rows, target, size, form), target, "row", size)
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"the function failed with ({split!r}, {size}): {type(error).__name__}: {error}",
            location=target,
            hint="fix it; `asyncrl --debug` shows the traceback",
        ) from error


def _function_rows(rows: Iterable[Any], target: str, size: int | None, form: RowForm) -> Iterator[tuple[int, Prompt]]:
    for number, row in enumerate(rows, start=1):
        if size is None and number > MOST_ROWS:
            raise DataError(f"more than {MOST_ROWS:,} rows", location=target, hint="give the split a size")
        if isinstance(row, Prompt):
            yield number, form.checked(row, f"{target}:{number}")
        elif isinstance(row, Mapping):
            yield number, form.prompt(row, target, "row", number)
        else:
            fault = f"the row is neither a mapping nor a Prompt but {kind(row)}"
            raise DataError(fault, location=f"{target}:{number}", hint='yield rows as {"prompt": …}')


def _function(target: str, base: Path) -> Any:
    function = import_named(target, base, target, "name a function f(split, size) that yields rows", DataError)
    try:
        inspect.signature(function).bind("train", None)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"cannot be called as f(split, size): {error}",
            location=target,
            hint="give it two parameters: the name of the split, and how many rows are wanted (None for all)",
        ) from None
    return function
