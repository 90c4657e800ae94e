"""Prompts from a Python function of the user's: ``module:function``, called with the split's name and size.

It yields rows (mappings of columns) or ``Prompt``s, the same ones at every call: a run that is resumed calls it again.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.core.user_code import import_user_module
from asyncrl_cli.data.rows import RowForm, collect, kind
from asyncrl_cli.records.prompt import Prompt

MOST_ROWS = 5_000_000
"""So many rows without an end are taken for endless."""


def read_function(target: str, base: Path, split: str, size: int | None, form: RowForm) -> list[Prompt]:
    """The first ``size`` prompts that ``target`` yields (all of them by default); modules are sought in ``base`` first.

    Raises ``DataError`` if it cannot be called, fails, gives fewer than ``size``, or gives what is no prompt.
    """
    function = _function(target, base)
    try:
        rows = function(split, size)
        if not isinstance(rows, Iterable):
            raise DataError(f"{target} returned {kind(rows)}", hint="make it yield one mapping or Prompt per row")
        return collect(_prompts(rows, target, size, form), target, "row", size)
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{target}({split!r}, {size}) failed: {type(error).__name__}: {error}",
            hint="hint it; `asyncrl --debug` shows the whole traceback",
        ) from error


def _prompts(rows: Iterable[Any], target: str, size: int | None, form: RowForm) -> Iterator[tuple[int, Prompt]]:
    for number, row in enumerate(rows, start=1):
        if size is None and number > MOST_ROWS:
            raise DataError(f"{target} yields more than {MOST_ROWS:,} rows", hint="give the split a size")
        if isinstance(row, Prompt):
            yield number, form.checked(row, f"{target}:{number}")
        elif isinstance(row, Mapping):
            yield number, form.prompt(row, target, "row", number)
        else:
            raise DataError(
                f"the row is neither a mapping nor a Prompt but {kind(row)}",
                location=f"{target}:{number}",
                hint='yield rows as {"prompt": …}',
            )


def _function(target: str, base: Path) -> Any:
    module_name, _, name = target.partition(":")
    try:
        function = getattr(import_user_module(module_name, base), name)
    except Exception as error:
        raise DataError(
            f"{target} cannot be imported: {type(error).__name__}: {error}",
            hint=f"put {module_name.replace('.', '/')}.py with the function {name} beside the spec file",
        ) from error
    try:
        inspect.signature(function).bind("train", None)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{target} cannot be called as f(split, size): {error}",
            hint="give it two arguments: the split's name, and how many rows are wanted (None for all)",
        ) from None
    return function
