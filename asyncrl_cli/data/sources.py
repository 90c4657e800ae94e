"""What a split's ``path`` names, told from the text alone, and how each kind is opened.

hf:owner/name       a data set of the Hugging Face hub
module:function     a Python function that yields rows
*.jsonl, *.ndjson   JSON Lines
*.parquet, *.csv    these
no suffix           a folder that Hugging Face `datasets` saved
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.arrow_table import read_parquet
from asyncrl_cli.data.csv_file import read_csv
from asyncrl_cli.data.function_source import read_function
from asyncrl_cli.data.hugging_face import HUB, read_hub, read_saved
from asyncrl_cli.data.jsonl import read_jsonl
from asyncrl_cli.data.rows import RowForm
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.sections import SplitSpec

Kind = Literal["hub", "function", "jsonl", "parquet", "csv", "saved"]
SUFFIXES: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".csv": "csv", "": "saved"}
NAMES = ", ".join(filter(None, SUFFIXES))
FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def kind_of(path: str) -> Kind | None:
    """The kind of a source; None for a file of a suffix that says none."""
    if path.startswith(HUB):
        return "hub"
    if FUNCTION.fullmatch(path):
        return "function"
    suffix = os.path.splitext(path)[1].lower()
    return SUFFIXES.get(suffix, "saved" if os.path.isdir(path) else None)


def names_a_file(path: str) -> bool:
    """Whether it is the path of a file or folder."""
    return kind_of(path) not in ("hub", "function")


def read_source(
    spec: SplitSpec, split: str, base: Path, check: Callable[[Prompt], None] | None = None
) -> Sequence[Prompt]:
    """The prompts of a split that has a ``path``; ``base`` is where relative paths and modules are sought.

    ``split`` is what a function is told; ``check`` is the task's look at each prompt. Raises ``DataError``.
    """
    assert spec.path is not None
    form = RowForm(spec.prompt_column, spec.uid_column, spec.template, spec.system, check)
    path = base / Path(spec.path).expanduser()
    match kind_of(spec.path):
        case "hub":
            return read_hub(spec.path, spec.config, spec.split or "train", spec.size, form)
        case "function":
            return read_function(spec.path, base, split, spec.size, form)
        case "parquet":
            return read_parquet(path, spec.size, form)
        case "csv":
            return read_csv(path, spec.size, form)
        case "saved":
            return read_saved(path, spec.split, spec.size, form)
        case "jsonl":
            return read_jsonl(path, spec.size, form)
        case None:
            raise DataError(f"{path} has a name that does not say what it is", hint=f"name it with one of {NAMES}")
