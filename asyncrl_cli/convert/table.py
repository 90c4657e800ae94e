"""Applies a trainer's tables of keys to a configuration, and writes the spec with a comment for every key."""

from __future__ import annotations

import os
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import BaseModel, BeforeValidator, Field, field_validator

from asyncrl_cli.convert.config import NAME_KEYS, ForeignConfig, display_text
from asyncrl_cli.core.secrets import hide
from asyncrl_cli.core.terminal import printable

OFF: tuple[Any, ...] = (None, False, 0, -1, "", "no", "none", "None", "disabled", [], {}, "???")
"""Values that switch a feature off in every supported trainer."""
WIDTH = 116
CHECK = "CHECK"
"""The mark of comments that need a decision."""
PATHS = ("model.path", "data.train.path", "data.eval.path")


def _by_text(values: dict[Any, Any]) -> dict[str, Any]:
    return {str(key).lower(): value for key, value in values.items()}


ByText = Annotated[dict[str, Any], BeforeValidator(_by_text)]
"""Entries by the text of a value, in lower case."""
Words = Annotated[tuple[str, ...], BeforeValidator(str.split)]


class Row(BaseModel):
    """Names of another trainer's keys that decide keys of a spec. They may be patterns, where `*` is any text.

    A key that the trainer's ``settings`` do not compute has the value of the first name that is set.
    """

    names: Words = Field(alias="from")
    further_names: Words = Field((), alias="also")
    """Names that decide the value, too, by a condition or in the trainer's module. They are never the value."""
    note: str = ""
    when: str = ""
    """The condition under which the row holds, as in ``ForeignConfig.holds``."""
    cases: tuple[tuple[str, Any], ...] = ()
    """Conditions, as in ``when``, with the spec's values: the first that holds decides. `=name` is that key's value, to
    which ``values`` apply."""
    values: ByText = {}
    """The spec's value for each value of the other trainer; `*` is any other value."""
    fallback: Any = Field(None, alias="else")
    """The spec's value for a value that ``values`` lacks, with a remark."""
    checks: ByText = Field({}, alias="check")
    """Remarks for values."""
    takes_list: bool = Field(False, alias="list")
    """True if the spec's value is the list of the values of all names."""


class Lost(BaseModel):
    """Keys without a counterpart, with advice. With a ``neutral`` value, a key has no effect."""

    keys: Words
    hint: str
    neutral: tuple[Any, ...] = ()


class Table(BaseModel):
    """A file of ``tables/``: the keys of another trainer. In the file, `$` stands for ``prefix``."""

    prefix: str = ""
    rows: dict[str, Row] = {}
    """Rows by the keys of the spec that they decide, in the spec's order."""
    lost: tuple[Lost, ...] = ()
    unsupported: tuple[Lost, ...] = ()
    """Keys of runs that would train something else here."""
    refused: tuple[tuple[str, str], ...] = ()
    """Conditions of such runs, each with the reason."""
    needless: Words = ()
    """Patterns of keys that a spec does not need."""
    checks: dict[str, tuple[str, ...]] = {}
    """Remarks: the key of the spec, the text, and a condition. The trainer's module adds those without a condition."""
    defaults: dict[str, Any] = {}
    variants: dict[str, dict[str, Any]] = {}
    """Further defaults of the trainer's programs."""

    @field_validator("rows", mode="before")
    @classmethod
    def _short_rows(cls, rows: dict[str, Any]) -> dict[str, Any]:
        return {key: row if isinstance(row, dict) else {"from": row} for key, row in rows.items()}


@cache
def table(name: str) -> Table:
    """Read a file of ``tables/``."""
    text = (Path(__file__).parent / "tables" / f"{name}.yaml").read_text(encoding="utf-8")
    prefix = yaml.safe_load(text).get("prefix", "")
    return Table.model_validate(yaml.safe_load(text.replace("$", prefix)))


class Trainer(NamedTuple):
    """Another trainer. ``settings`` computes values of spec keys. ``variant`` names its program."""

    name: str
    table: Table
    settings: Callable[[ForeignConfig], dict[str, Any]]
    variant: str = ""

    def config(self, values: Mapping[str, Any]) -> ForeignConfig:
        """Return a configuration with the trainer's defaults, and the variant's name as the key `variant`."""
        defaults = self.table.defaults | self.table.variants.get(self.variant, {}) | {"variant": self.variant}
        return ForeignConfig(values, defaults, self.table.prefix, table("shared").checks | self.table.checks)


class Setting(NamedTuple):
    """One key of the spec, the other trainer's keys that decided it with their values, and comments.

    If the value is None, only the comments are written.
    """

    key: str
    value: Any
    origins: dict[str, Any]
    note: str
    remarks: tuple[str, ...]


@dataclass(slots=True)
class Conversion:
    """A converted configuration. ``lost`` has keys by their hint; ``needless`` keys have no effect on the spec."""

    trainer: Trainer
    config: ForeignConfig
    settings: list[Setting] = field(default_factory=list)
    lost: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    needless: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def unsupported(self) -> list[str]:
        """The reasons why the spec trains something else."""
        return self.config.unsupported

    @property
    def summary(self) -> str:
        """The result in one line."""
        return (
            f"{len(self.config.values)} keys read, {len(self.settings)} written, {len(self.remarks)} to check, "
            f"{sum(map(len, self.lost.values()))} without a counterpart, {len(self.unknown)} unknown (look for {CHECK})"
        )

    @property
    def remarks(self) -> list[tuple[str, str]]:
        """Points that the user has to check, each with its key of the spec."""
        return [(setting.key, remark) for setting in self.settings for remark in setting.remarks]


def convert(values: Mapping[str, Any], trainer: Trainer) -> Conversion:
    """Convert a configuration by dotted keys. Every key is in the result: with a setting, in a list, or as unknown."""
    foreign, config = trainer.table, trainer.config(values)
    computed = trainer.settings(config)
    for key, text, *condition in foreign.checks.values():
        if condition and config.holds(condition[0]):
            config.remark(key, text)
    config.unsupported += [reason for condition, reason in foreign.refused if config.holds(condition)]
    result = Conversion(trainer, config)
    row_names: set[str] = set()
    converted: set[str] = set()
    for keys, row in foreign.rows.items():
        names = [name for pattern in row.names for name in config.matching(pattern)]
        all_names = [*names, *(name for pattern in row.further_names for name in config.matching(pattern))]
        row_names.update(all_names)
        for key in keys.split():
            value = computed[key] if key in computed else _value(config, key, row, names)
            remarks = tuple(config.remarks.get(key, ()))
            if value is not None or remarks:
                origins = {name: config.values[name] for name in all_names if name in config.values}
                converted.update(origins)
                result.settings.append(Setting(key, value, origins, row.note, remarks))
    for name, value in config.values.items():
        if name in converted:
            continue
        unsupported, loss = _row_for(name, foreign.unsupported), _row_for(name, foreign.lost)
        if name in row_names or any(_is_off(value, entry.neutral) for entry in (unsupported, loss) if entry):
            result.needless.append(name)
        elif entry := unsupported or loss:
            result.lost[entry.hint].append(name)
            config.unsupported += [f"{name} = {display_text(value)}: {entry.hint}"] if unsupported else []
        else:
            is_needless = any(fnmatchcase(name, pattern) for pattern in foreign.needless)
            (result.needless if is_needless else result.unknown).append(name)
    return result


def _value(config: ForeignConfig, key: str, row: Row, names: Sequence[str]) -> Any:
    """The value that a row gives by itself."""
    if row.when and not config.holds(row.when):
        return None
    if row.takes_list:
        return [config.get(name) for name in row.names]
    for condition, case_value in row.cases:
        if not condition or config.holds(condition):
            if not str(case_value).startswith("="):
                return case_value
            names = [case_value[1:]]
            break
    value = config.name(key, *names) if key in NAME_KEYS else config.get(*names)
    text = str(value).lower()
    if text in row.checks:
        config.remark(key, row.checks[text])
    if text not in row.values and "fallback" in row.model_fields_set and value is not None:
        replacement = "" if row.fallback is None else f": `{row.fallback}` is used instead"
        config.remark(key, f"{names[0]}={value} has no counterpart{replacement}")
        return row.fallback
    return row.values.get(text, row.values.get("*", value) if row.values else value)


def _row_for(name: str, table: Sequence[Lost]) -> Lost | None:
    return next((row for row in table if any(fnmatchcase(name, pattern) for pattern in row.keys)), None)


def _is_off(value: Any, neutral_values: tuple[Any, ...]) -> bool:
    """True for a value of ``OFF`` or ``neutral_values``; True is not the number 1."""
    return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in (*OFF, *neutral_values))


def spec_text(conversion: Conversion, origin: str, folder: Path) -> str:
    """Return the text of a converted spec.

    ``origin`` names the converted configuration. ``folder`` is the spec's folder, where its relative paths start; in
    the source they start in the current folder.
    """
    trainer, values = conversion.trainer.name, conversion.config.values
    lines = [
        f"# Converted by `asyncrl convert {trainer.lower()}` from {_line(origin)}.",
        f"# Each comment names the keys of {trainer} that decided a value; `{CHECK}` marks points to check. Values",
        f"# without a comment are {trainer}'s defaults and asyncrl's.",
    ]
    tree: dict[str, Any] = {}
    for setting in conversion.settings:
        *sections, name = setting.key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = setting
    lines += _section(tree, folder=folder, indent="")
    for hint, names in conversion.lost.items():
        lines += ["", *_comment(f"{CHECK}: no counterpart, so this spec lacks their effect: {hint}", "")]
        lines += [f"#     {name} = {_line(display_text(values[name]))}" for name in sorted(names)]
    if conversion.unknown:
        lines += ["", f"# {CHECK}: unknown keys. Nothing was converted from them."]
        lines += [f"#     {name} = {_line(display_text(values[name]))}" for name in sorted(conversion.unknown)]
    if conversion.needless:
        lines += [
            "",
            "# Without a counterpart, and none is needed:",
            *_comment(", ".join(sorted(conversion.needless)), ""),
        ]
    return printable(hide("\n".join(lines))) + "\n"


def _section(tree: dict[str, Any], folder: Path, indent: str) -> Iterator[str]:
    for name, inner in tree.items():
        if isinstance(inner, dict):
            yield from [""] * (not indent)
            yield f"{indent}{name}:"
            yield from _section(inner, folder=folder, indent=f"{indent}  ")
            continue
        if inner.origins:
            origins = ", ".join(f"{key} = {display_text(value)}" for key, value in inner.origins.items())
            yield from _comment(f"{origins}; {inner.note}" if inner.note else origins, indent)
        for remark in inner.remarks:
            yield from _comment(f"{CHECK} {name}: {remark}", indent)
        if inner.value is not None:
            value = _from_folder(inner.value, folder) if inner.key in PATHS else inner.value
            yield f"{indent}{name}: {_yaml(value)}"


def _yaml(value: Any) -> str:
    is_printable = printable(str(value)) == str(value)  # Other characters are written as escapes.
    style = '"' if isinstance(value, str) and (not is_printable or "\n" in value) else None
    text = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=10**6, allow_unicode=is_printable)
    return text.removesuffix("...\n").strip()


def _from_folder(path: Any, folder: Path) -> Any:
    """Make an existing path, or each path of a list, relative to ``folder`` instead of the current folder."""
    if isinstance(path, list):
        return [_from_folder(item, folder) for item in path]
    path = str(path)
    is_path = path.endswith((".parquet", ".jsonl", ".json", ".csv")) or os.path.exists(path)
    if not is_path or path.startswith(("/", "~", "$", "hf:")) or folder.resolve() == Path.cwd():
        return path
    return os.path.relpath(path, folder)


def _comment(text: str, indent: str) -> Iterable[str]:
    """A comment. Its first line is wrapped; further lines are code and stay unchanged."""
    text, *code_lines = text.split("\n")
    wrapped = textwrap.wrap(_line(text), WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    return [f"{indent}# {_line(line)}".rstrip() for line in (*wrapped, *code_lines)]


def _line(text: str) -> str:
    """The text without line breaks, including breaks that only YAML knows."""
    return re.sub(r"[\r\n\x85\u2028\u2029]+", " ", text)
