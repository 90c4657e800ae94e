"""Opens the source of a split's prompts, of any kind (``spec.data_sources``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.arrow_table import read_parquet
from asyncrl_cli.data.csv_file import read_csv
from asyncrl_cli.data.function_source import read_function
from asyncrl_cli.data.hugging_face import read_hub, read_saved
from asyncrl_cli.data.jsonl import read_jsonl
from asyncrl_cli.data.rows import RowForm
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.data_sources import SUFFIXES, kind_of
from asyncrl_cli.spec.inputs import SplitSpec


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
            suffixes = ", ".join(filter(None, SUFFIXES))
            raise DataError("unknown kind of file", location=str(path), hint=f"give it one of the suffixes {suffixes}")
