"""Applies a trainer's table of keys to a configuration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from fnmatch import fnmatchcase
from typing import Any

from asyncrl_cli.convert.source import Source, shown

OFF: tuple[Any, ...] = (None, False, 0, -1, "", "no", "none", "None", "disabled", [], {}, "???")
"""Values that switch a feature off in every supported trainer."""


@dataclass(frozen=True, slots=True)
class Row:
    """Keys of the other trainer that decide one key of a spec.

    ``names``: the keys, separated by spaces; they may be patterns (`*` is any text).
    ``note``: a difference between the trainers.
    """

    names: str
    key: str
    note: str = ""


class Without(Enum):
    """Consequence of a key without a counterpart."""

    NEEDLESS = auto()
    """None: a spec does not need the key."""
    LOST = auto()
    """The spec lacks a part of the configuration: the user has to look at it."""
    UNSUPPORTED = auto()
    """The spec would train something else. It does not count as valid."""


@dataclass(frozen=True, slots=True)
class Other:
    """Keys (``names``, as in ``Row``) without a counterpart.

    ``note``: advice to the user.
    ``off``: further values that switch the feature off.
    ``when``: the row holds only for configurations that pass this test.
    """

    kind: Without
    names: str
    note: str
    off: tuple[Any, ...] = ()
    when: Callable[[Source], bool] | None = None


def lost(names: str, note: str, *off: Any, when: Callable[[Source], bool] | None = None) -> Other:
    """Return a row for keys that a spec cannot express."""
    return Other(Without.LOST, names=names, note=note, off=off, when=when)


def unsupported(names: str, note: str, when: Callable[[Source], bool] | None = None) -> Other:
    """Return a row for keys of runs that asyncrl cannot train, such as runs with videos."""
    return Other(Without.UNSUPPORTED, names, note, when=when)


def needless(names: str, note: str) -> Other:
    """Return a row for keys that a spec does not need."""
    return Other(Without.NEEDLESS, names, note)


@dataclass(frozen=True, slots=True)
class Trainer:
    """Another trainer: its name, its defaults by key, and the tables of its keys.

    ``rows`` are in the order of the spec. The first match in ``others`` decides. ``settings`` computes values of spec
    keys. A key without such a value gets the value of the first name in its row that is set.
    """

    name: str
    defaults: Mapping[str, Any]
    rows: Sequence[Row]
    others: Sequence[Other]
    settings: Callable[[Source], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the spec: its value, the source's keys that decided it with their values, a note, and remarks.

    If the value is None, only the comment with the remarks is written.
    """

    key: str
    value: Any
    sources: dict[str, Any]
    note: str
    remarks: tuple[str, ...]


@dataclass(slots=True)
class Conversion:
    """A converted configuration.

    ``lost`` and ``needless`` have keys by their note, ``unsupported`` the reasons why the spec trains something else.
    """

    source: Source
    trainer: Trainer
    settings: list[Setting] = field(default_factory=list)
    lost: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    needless: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    unused: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)

    @property
    def remarks(self) -> list[tuple[str, str]]:
        """Points that the user has to check, each with its key of the spec."""
        return [(setting.key, remark) for setting in self.settings for remark in setting.remarks]


def convert(given: Mapping[str, Any], trainer: Trainer) -> Conversion:
    """Convert a configuration by dotted keys. Every key is in the result: with a setting, in a list, or as unknown."""
    source = Source(given, trainer.defaults)
    values = trainer.settings(source)
    result = Conversion(source, trainer)
    converted: set[str] = set()
    mapped: set[str] = set()
    for row in trainer.rows:
        names = [name for pattern in row.names.split() for name in source.matching(pattern)]
        mapped.update(names)
        value = values[row.key] if row.key in values else source.get(*names, *row.names.split())
        remarks = tuple(source.remarks.get(row.key, ()))
        if value is not None or remarks:
            sources = {name: source.given[name] for name in names if name in source.given}
            converted.update(sources)
            result.settings.append(Setting(row.key, value, sources, note=row.note, remarks=remarks))
    for name, value in source.given.items():
        if name in converted:
            continue
        other = next((other for other in trainer.others if _holds(other, name, source)), None)
        needed = other is not None and other.kind is not Without.NEEDLESS
        if name in mapped or (other and needed and _is_off(value, other.off)):
            result.unused.append(name)
        elif other is None:
            result.unknown.append(name)
        else:
            (result.lost if needed else result.needless)[other.note].append(name)
            if other.kind is Without.UNSUPPORTED:
                source.unsupported.append(f"{name} = {shown(value)}: {other.note}")
    result.unsupported = source.unsupported
    return result


def _holds(other: Other, name: str, source: Source) -> bool:
    matches = any(fnmatchcase(name, pattern) for pattern in other.names.split())
    return matches and (other.when is None or other.when(source))


def _is_off(value: Any, off: tuple[Any, ...]) -> bool:
    """True for a value of ``OFF`` or ``off``; True is not the number 1."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in (*OFF, *off))
