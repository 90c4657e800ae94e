"""Opens a split's source of prompts (``spec.data_sources``): text files and Parquet, Hugging Face data sets, and user
functions.

Text files are JSON Lines (one object per line), a JSON list of objects, or CSV (RFC 4180) with column names in the
first line. Rows are named and located by the line on which they begin; blank lines are not rows. Rows of a JSON file
may differ in keys and types. Arrow's reader refuses that, so the standard library reads them.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import importlib
import inspect
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from json.decoder import WHITESPACE  # type: ignore[attr-defined]  # typeshed lacks it
from pathlib import Path
from typing import IO, Any, cast

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.core.files import LFS_HINT, lfs_pointer
from asyncrl_cli.core.user_code import import_named
from asyncrl_cli.data.arrow_table import ArrowPrompts, read_parquet
from asyncrl_cli.data.rows import ImagePrompts, JoinedPrompts, RowForm, kind
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.data_sources import HUB, SUFFIXES, TEXTS, files_of, kind_of, names_a_file
from asyncrl_cli.spec.inputs import SplitSpec

MOST_ROWS = 5_000_000
"""Without a size, a function that yields more rows than this counts as endless."""
LIST_HINT = "write a list of objects, [{…}, {…}], or one object per line"
LONGEST_CELL = 2**31 - 1
"""Characters. Python's own limit is shorter than some documents."""


def read_source(
    spec: SplitSpec, split: str, base: Path, check: Callable[[Prompt], None] | None = None
) -> Sequence[Prompt]:
    """Return the prompts of a split that has a ``path``; relative paths and modules start from ``base``.

    ``split`` is passed to a user function; ``check`` is the task's check of each prompt. Raises ``DataError``.
    """
    forms = _forms_of(spec, base, check)
    match kind_of(forms[0].source):
        case "hub" | "saved":
            return _read_data_set(spec, forms[0])
        case "function":
            return _read_function(spec, forms[0], base=base, split=split)
    if len(forms) == 1:
        return _read_file(forms[0], spec.size)
    parts: list[Sequence[Prompt]] = []
    left = spec.size
    for form in forms:
        if left == 0:
            break
        parts.append(_read_file(form, left))
        left = None if left is None else left - len(parts[-1])
    if left:
        fault = f"{len(forms)} files have fewer rows ({sum(map(len, parts))}) than size {spec.size}"
        forms[-1].refuse(None, fault, "lower or remove size")
    _refuse_twins(forms, parts)
    return JoinedPrompts(parts)


def _refuse_pointer(form: RowForm) -> None:
    with suppress(OSError):  # reading reports it
        if (pointer := lfs_pointer(Path(form.source))) is not None:
            raise DataError("is a Git LFS pointer, not the file itself", location=str(pointer), hint=LFS_HINT)


def _read_file(form: RowForm, size: int | None) -> Sequence[Prompt]:
    _refuse_pointer(form)
    match kind_of(form.source):
        case "parquet":
            return read_parquet(Path(form.source), size, form)
        case "csv" | "jsonl" | "json":
            try:
                return form.collect(_text_rows(form), size)
            except (OSError, EOFError, zlib.error) as error:
                reason = getattr(error, "strerror", None) or str(error)
                form.refuse(None, f"cannot be read: {reason}", "correct the path in the spec, or the file")
    suffixes = ", ".join(filter(None, SUFFIXES))
    raise DataError("unknown kind of file", location=form.source, hint=f"give it one of the suffixes {suffixes}")


def _refuse_twins(forms: Sequence[RowForm], parts: Sequence[Sequence[Prompt]]) -> None:
    first: dict[str, str] = {}
    for form, part in zip(forms, parts, strict=False):
        rows = part.rows if isinstance(part, ImagePrompts) else part
        uids = part.field(form.uid_column) if isinstance(part, ArrowPrompts) else [prompt.uid for prompt in rows]
        own = {str(uid) for uid in uids if uid is not None}
        if both := own & first.keys():
            uid = min(both)
            form.refuse(None, f"the uid {uid!r} is also a uid of {first[uid]}", "make uids unique over all files")
        first |= dict.fromkeys(own, form.source)


def row_location(spec: SplitSpec, base: Path, key: str, prompts: Sequence[Prompt], row: int) -> str:
    """Return the location of row ``row`` (from 0) of a split's ``prompts`` for messages: file and line, or source and
    row (from 1). ``key``: the split's key in the spec, for prompts that a task makes."""
    if spec.path is None:
        return f"{key}:{row + 1}"
    part, row = prompts.place(row) if isinstance(prompts, JoinedPrompts) else (0, row)
    form = _forms_of(spec, base)[part]
    if form.unit == "row":
        return f"{form.source}:{row + 1}"
    line, _ = next(islice(_text_rows(form), row, None))
    return f"{form.source}:{line}"


def _forms_of(spec: SplitSpec, base: Path, check: Callable[[Prompt], None] | None = None) -> list[RowForm]:
    located = [str(base / Path(path).expanduser()) if names_a_file(path) else path for path in spec.named]
    sources = [file for path in located for file in files_of(path)]
    return [
        RowForm(
            source=source,
            unit="line" if kind_of(source) in TEXTS else "row",
            prompt_column=spec.prompt_column,
            uid_column=spec.uid_column,
            template=spec.template,
            system=spec.system,
            check=check,
            part=part if len(sources) > 1 else None,
            image_column=spec.image_column,
            folder=Path(source).parent if names_a_file(source) else base,
        )
        for part, source in enumerate(sources)
    ]


def _opened(form: RowForm) -> IO[bytes]:
    """Open a text file's decompressed bytes. Zstandard comes from pyarrow: Python has it only since 3.14."""
    suffix = Path(form.source).suffix.lower()
    if suffix != ".zst":
        return cast("IO[bytes]", gzip.open(form.source)) if suffix == ".gz" else open(form.source, "rb")
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(form.source), "zstd"))


def _text_rows(form: RowForm) -> Iterator[tuple[int, Prompt]]:
    match kind_of(form.source):
        case "csv":
            return _csv_rows(form)
        case "json":
            with _opened(form) as file:
                is_list = file.read(2**16).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
            return _list_rows(form) if is_list else _line_rows(form)
    return _line_rows(form)


def _line_rows(form: RowForm) -> Iterator[tuple[int, Prompt]]:
    with _opened(form) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                row, _ = _parsed(form, number, _decoded(form, number, line))
                yield number, form.prompt(row, number, line.strip())


def _list_rows(form: RowForm) -> Iterator[tuple[int, Prompt]]:
    """Read the objects of a JSON list. Several may begin on one line, so uids also contain the number in the list."""
    with _opened(form) as file:
        text = _decoded(form, 1, file.read())
    line, counted, number = 1, 0, 0
    at = WHITESPACE.match(text, text.index("[") + 1).end()
    while text[at : at + 1] != "]":
        line, counted = line + text.count("\n", counted, at), at
        row, end = _parsed(form, line, text, at)
        number += 1
        yield line, form.prompt(row, line, f"{number} {text[at:end]}".encode())
        at = WHITESPACE.match(text, end).end()
        if text[at : at + 1] not in (",", "]"):
            form.refuse(line, "not JSON: no comma or ] after the row that begins here", LIST_HINT)
        if text[at] == ",":
            at = WHITESPACE.match(text, at + 1).end()
    if text[at + 1 :].strip():
        form.refuse(line + text.count("\n", counted, at), "not JSON: text after the list", LIST_HINT)


def _decoded(form: RowForm, number: int, text: bytes) -> str:
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = text.rfind(b"\n", 0, error.start) + 1
        number += text.count(b"\n", 0, start)
        form.refuse(number, f"not UTF-8 (byte {error.start - start})", "save the file as UTF-8")


def _parsed(form: RowForm, number: int, text: str, at: int | None = None) -> tuple[dict[str, Any], int]:
    """Parse the row that is the whole line ``number``, or that begins on it at index ``at``; returns row and end."""
    row: Any
    try:
        row, end = (json.loads(text), len(text)) if at is None else json.JSONDecoder().raw_decode(text, at)
    except json.JSONDecodeError as error:
        line, hint = (number, "write one JSON object per line") if at is None else (error.lineno, LIST_HINT)
        form.refuse(line, f"not JSON: {error.msg} at column {error.colno}", hint)
    except ValueError:  # Python's limit, because longer integers take quadratic time
        digits = sys.get_int_max_str_digits()
        form.refuse(number, f"an integer has more than {digits:,} digits", "write it as text, in quotes")
    except RecursionError:
        form.refuse(number, "lists or objects are nested too deeply", "flatten the row")
    if not isinstance(row, dict):
        form.refuse(number, f"not a JSON object but {kind(row)}", 'write rows as {"prompt": …}')
    return row, end


def _csv_rows(form: RowForm) -> Iterator[tuple[int, Prompt]]:
    csv.field_size_limit(LONGEST_CELL)
    with io.TextIOWrapper(_opened(form), newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        line = 1
        header: list[str] = []
        try:
            for cells in reader:
                if not header:
                    header = cells
                    if len(set(header)) < len(header) or "" in header:
                        form.refuse(line, "duplicate or empty column names", "give each column a unique name")
                elif cells:
                    if len(cells) != len(header):
                        fault = f"{len(cells)} values for {len(header)} columns"
                        form.refuse(line, fault, "put values with commas in quotes")
                    yield line, form.prompt(dict(zip(header, cells, strict=True)), line)
                line = reader.line_num + 1
        except csv.Error as error:
            hint = "put values with commas, quotes or line breaks in quotes, and double the quotes in them"
            form.refuse(line, f"not CSV: {error}", hint)
        except UnicodeDecodeError as error:
            form.refuse(line, f"not UTF-8 here or soon after ({error.reason})", "save the file as UTF-8")


def _read_data_set(spec: SplitSpec, form: RowForm) -> ArrowPrompts:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        form.refuse(None, f"needs Hugging Face datasets: {error}", "pip install 'asyncrl[data]'")
    name, _, revision = form.source.removeprefix(HUB).partition("@")
    hub = form.source.startswith(HUB)
    split = spec.split or "train" if hub else spec.split
    if not hub:
        _refuse_pointer(form)
    try:
        if hub:
            found = datasets.load_dataset(name, spec.config, split=split, revision=revision or None)
        else:
            found = datasets.load_from_disk(form.source)
    except Exception as error:
        reason = (str(error).splitlines() or ["no message"])[0]
        fault = f"cannot be {'loaded' if hub else 'read'}: {type(error).__name__}: {reason}"
        hint = "name a folder that Dataset.save_to_disk or DatasetDict.save_to_disk wrote"
        if hub:
            hint = "check name, config, split and the network; without one, name a folder that save_to_disk wrote"
        raise DataError(fault, location=form.source, hint=hint) from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            fault = "the data set has several splits" if split is None else f"no split {split!r}"
            form.refuse(None, fault, f"set `split` to one of {', '.join(found)}")
        found = found[split]
    elif split is not None and not hub:
        form.refuse(None, f"no split {split!r}: the data set has no splits", "remove `split`")
    mapped = [file["filename"] for file in found.cache_files]
    return ArrowPrompts(found.with_format("arrow")[: spec.size], spec.size, form, mapped=mapped)


def _read_function(spec: SplitSpec, form: RowForm, base: Path, split: str) -> Sequence[Prompt]:
    """Collect the first ``size`` prompts (None: all) that a function yields as mappings or ``Prompt``s. It must yield
    the same rows in every call, because a resumed run calls it again."""
    target, size = form.source, spec.size
    hint = "name a function f(split, size) that yields rows"
    function = import_named(target, base, location=target, hint=hint, error_type=DataError)
    try:
        inspect.signature(function).bind("train", None)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"cannot be called as f(split, size): {error}",
            location=target,
            hint="give it two parameters: the split's name, and the number of rows (None: all)",
        ) from None

    def prompts(rows: Iterable[Any]) -> Iterator[tuple[int, Prompt]]:
        for number, row in enumerate(rows, start=1):
            if size is None and number > MOST_ROWS:
                form.refuse(None, f"more than {MOST_ROWS:,} rows", "give the split a size")
            if isinstance(row, Prompt):
                yield number, form.checked(row, number)
            elif isinstance(row, Mapping):
                yield number, form.prompt(row, number)
            else:
                fault = f"the row is neither a mapping nor a Prompt but {kind(row)}"
                form.refuse(number, fault, 'yield rows as {"prompt": …}')

    try:
        rows = function(split, size)
        if not isinstance(rows, Iterable):
            form.refuse(None, f"the function returned {kind(rows)}", "yield one mapping or Prompt per row")
        return form.collect(prompts(rows), size)
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"the function failed with ({split!r}, {size}): {type(error).__name__}: {error}",
            location=target,
            hint="fix it; `asyncrl --debug` shows the traceback",
        ) from error
