"""Opens a split's source of prompts (``spec.data_sources``): files, data sets of the hub, and user functions.

Arrow reads CSV and Parquet. JSON files are JSON Lines (one object per line), or a list of objects. Their rows may
differ in keys and types, which Arrow's reader refuses or fills with nulls, so the standard library reads them.
"""

from __future__ import annotations

import codecs
import gzip
import importlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.core.files import LFS_HINT, is_pointer
from asyncrl_cli.core.user_code import import_named
from asyncrl_cli.data.arrow_table import ArrowPrompts, read_table
from asyncrl_cli.data.rows import CollectedPrompts, JoinedPrompts, RowForm, SourcePrompts, type_name
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.data_sources import HUB, SUFFIXES, files_of, names_a_file, source_type_of
from asyncrl_cli.spec.inputs import SplitSpec


def read_source(
    spec: SplitSpec, split: str, base: Path, check: Callable[[Prompt], None] | None = None
) -> Sequence[Prompt]:
    """Return the prompts of a split that has a ``path``; relative paths and modules start from ``base``.

    ``split`` is passed to a user function; ``check`` is the task's check of each prompt. Raises ``DataError``.
    """
    files: list[SourcePrompts] = []
    missing_rows = spec.size
    for form in _forms_of(spec, base, check):
        if missing_rows != 0:
            files.append(_read(form, spec, missing_rows, base=base, split=split))
            missing_rows = None if missing_rows is None else missing_rows - len(files[-1])
    joined = JoinedPrompts(files)
    if missing_rows:
        files[-1].form.refuse(None, f"fewer rows ({len(joined)}) than size {spec.size}", "lower or remove size")
    return files[0] if len(files) == 1 else joined


def row_location(key: str, prompts: Sequence[Prompt], row: int) -> str:
    """Return the location of row ``row`` (from 0) of a split's ``prompts`` for messages: source and line, or source and
    row (from 1). ``key``: the split's key in the spec, for prompts that a task makes."""
    return prompts.location(row) if isinstance(prompts, SourcePrompts | JoinedPrompts) else f"{key}:{row + 1}"


def _forms_of(spec: SplitSpec, base: Path, check: Callable[[Prompt], None] | None) -> list[RowForm]:
    paths = [str(base / Path(path).expanduser()) if names_a_file(path) else path for path in spec.path_list]
    sources = [file for path in paths for file in files_of(path)]
    return [
        RowForm(
            source=source,
            unit="line" if source_type_of(source) in ("jsonl", "json") else "row",
            prompt_column=spec.prompt_column,
            uid_column=spec.uid_column,
            template=spec.template,
            system=spec.system,
            check=check,
            file_index=index if len(sources) > 1 else None,
            image_column=spec.image_column,
            folder=Path(source).parent if names_a_file(source) else base,
        )
        for index, source in enumerate(sources)
    ]


def _read(form: RowForm, spec: SplitSpec, size: int | None, *, base: Path, split: str) -> SourcePrompts:
    source_type = source_type_of(form.source)
    if source_type == "hub":
        return _read_data_set(spec, form)
    if source_type == "function":
        return _read_function(form, size, base=base, split=split)
    with suppress(OSError):  # reading reports it
        if is_pointer(Path(form.source)):
            form.refuse(None, "is a Git LFS pointer, not the file itself", LFS_HINT)
    match source_type:
        case "parquet" | "csv":
            return read_table(Path(form.source), size, form)
        case "jsonl" | "json":
            try:
                return CollectedPrompts(form, _json_rows(form), size)
            except (OSError, EOFError, zlib.error) as error:
                reason = getattr(error, "strerror", None) or str(error)
                form.refuse(None, f"cannot be read: {reason}", "correct the path in the spec, or the file")
    suffixes = ", ".join(SUFFIXES)
    raise DataError("unknown kind of file", location=form.source, hint=f"give it one of the suffixes {suffixes}")


def _opened(form: RowForm) -> IO[bytes]:
    """Open a text file's decompressed bytes."""
    is_compressed = form.source.lower().endswith(".gz")
    return cast("IO[bytes]", gzip.open(form.source)) if is_compressed else open(form.source, "rb")


def _json_rows(form: RowForm) -> Iterator[tuple[int, Prompt]]:
    """Yield the prompts of JSON Lines with their lines, or those of a JSON list with their numbers in the list."""
    with _opened(form) as file:
        is_list = file.read(2**16).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    with _opened(form) as file:
        if is_list and source_type_of(form.source) == "json":
            for row_number, row in enumerate(_parsed(form, 1, file.read()), start=1):
                yield row_number, form.prompt(_object(form, row_number, row), row_number)
            return
        for row_number, line in enumerate(file, start=1):
            if line.strip():
                row = _object(form, row_number, _parsed(form, row_number, line.rstrip()))
                yield row_number, form.prompt(row, row_number, line.strip())


def _parsed(form: RowForm, row_number: int, content: bytes) -> Any:
    """Parse JSON that begins on line ``row_number``."""
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        row_number += content.count(b"\n", 0, error.start)
        column = error.start - content.rfind(b"\n", 0, error.start) - 1
        form.refuse(row_number, f"not UTF-8 (byte {column})", "save the file as UTF-8")
    except json.JSONDecodeError as error:
        hint = "write one JSON object per line; a file with the suffix .json may be a list of objects"
        form.refuse(row_number + error.lineno - 1, f"not JSON: {error.msg} at column {error.colno}", hint)
    except (ValueError, RecursionError) as error:  # an integer of more than 4,300 digits; lists in lists in lists
        form.refuse(row_number, f"not JSON that can be read: {error}", "write large integers as text; flatten the row")


def _object(form: RowForm, row_number: int, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        form.refuse(row_number, f"not a JSON object but {type_name(row)}", 'write rows as {"prompt": …}')
    return row


def _read_data_set(spec: SplitSpec, form: RowForm) -> ArrowPrompts:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        form.refuse(None, f"needs Hugging Face datasets: {error}", "pip install 'asyncrl[data]'")
    name, _, revision = form.source.removeprefix(HUB).partition("@")
    try:
        data_set = datasets.load_dataset(name, spec.config, split=spec.split or "train", revision=revision or None)
    except Exception as error:
        reason = (str(error).splitlines() or ["no message"])[0]
        fault = f"cannot be loaded: {type(error).__name__}: {reason}"
        hint = "check name, config, split and the network; without one, name a Parquet file (Dataset.to_parquet)"
        raise DataError(fault, location=form.source, hint=hint) from error
    return ArrowPrompts(data_set.with_format("arrow")[: spec.size], form)


def _read_function(form: RowForm, size: int | None, *, base: Path, split: str) -> CollectedPrompts:
    """Collect the first ``size`` prompts (None: all) that a function yields as mappings or ``Prompt``s. It must yield
    the same rows in every call, because a resumed run calls it again."""
    target = form.source
    hint = "name a function f(split, size) that yields rows"
    function = import_named(target, base, location=target, hint=hint, error_type=DataError)

    def prompts(rows: Iterable[Any]) -> Iterator[tuple[int, Prompt]]:
        for row_number, row in enumerate(rows, start=1):
            if isinstance(row, Prompt):
                yield row_number, form.checked(row, row_number)
            elif isinstance(row, Mapping):
                yield row_number, form.prompt(row, row_number)
            else:
                fault = f"the row is neither a mapping nor a Prompt but {type_name(row)}"
                form.refuse(row_number, fault, 'yield rows as {"prompt": …}')

    try:
        rows = function(split, size)
        if not isinstance(rows, Iterable):
            form.refuse(None, f"the function returned {type_name(rows)}", "yield one mapping or Prompt per row")
        return CollectedPrompts(form, prompts(rows), size)
    except DataError:
        raise
    except Exception as error:
        fault = f"the function failed with ({split!r}, {size}): {type(error).__name__}: {error}"
        hint = "fix it: a function gets the split's name and the number of rows; `asyncrl --debug` shows the traceback"
        raise DataError(fault, location=target, hint=hint) from error
