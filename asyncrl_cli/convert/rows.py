"""A table of rows, applied to a configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from asyncrl_cli.convert.source import Source, shown

OFF: tuple[Any, ...] = (None, False, 0, -1, "", "no", "none", "None", "disabled", [], {}, "???")
"""Values that leave a feature unused in every trainer that is read here."""


@dataclass(frozen=True, slots=True)
class Row:
    """Keys of the other trainer, and the key of a spec that they decide, or why there is none.

    ``names``: the keys, separated by spaces; they may be patterns (`*` is any text).
    ``key``: the spec's key, or empty.
    ``note``: what differs, or without ``key`` what to do instead.
    ``value``: the spec's value from the source; None: the key is not written. Default: the value of the first name.
    ``off``: without ``key``: further values that leave the feature unused.
    ``needed``: without ``key``: whether something of the configuration is lost, so that the user has to look at it.
    ``when``: without ``key``: a condition of the whole configuration, without which the row does not hold.
    ``supported``: without ``key``: False if the spec would train something else. It then does not count as valid.
    """

    names: str
    key: str = ""
    note: str = ""
    value: Callable[[Source], Any] | None = None
    off: tuple[Any, ...] = ()
    needed: bool = True
    when: Callable[[Source], bool] | None = None
    supported: bool = True


def lost(names: str, note: str, *off: Any, when: Callable[[Source], bool] | None = None) -> Row:
    """Keys that a spec cannot express; ``off``: values that leave them unused."""
    return Row(names, note=note, off=off, when=when)


def unsupported(names: str, note: str, *off: Any, when: Callable[[Source], bool] | None = None) -> Row:
    """Keys of a run that asyncrl cannot train, such as one with images."""
    return Row(names, note=note, off=off, when=when, supported=False)


def needless(names: str, note: str) -> Row:
    """Keys that a spec does not need."""
    return Row(names, note=note, needed=False)


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the spec: its value, the keys of the source that decided it with their values, and what to
    know about it.

    A value of None is not written: the comment alone is, with its remarks.
    """

    key: str
    value: Any
    sources: tuple[tuple[str, Any], ...]
    note: str
    remarks: tuple[str, ...]


@dataclass(slots=True)
class Conversion:
    """A configuration, converted: ``lost`` and ``needless`` are keys by their note, ``unsupported`` are the reasons why
    the spec trains something else."""

    source: Source
    settings: list[Setting] = field(default_factory=list)
    lost: dict[str, list[str]] = field(default_factory=dict)
    needless: dict[str, list[str]] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)

    @property
    def remarks(self) -> list[tuple[str, str]]:
        """What the user has to look at, with the key of the spec that it is about."""
        return [(setting.key, remark) for setting in self.settings for remark in setting.remarks]


def convert(source: Source, rows: Sequence[Row]) -> Conversion:
    """Apply the rows. Every key of the source is in the result: with a setting, in a list, or unknown."""
    result = Conversion(source)
    converted: set[str] = set()
    mapped: set[str] = set()
    for row in (row for row in rows if row.key):
        names = [name for pattern in row.names.split() for name in source.matching(pattern)]
        mapped.update(names)
        source.remarks = []
        value = row.value(source) if row.value else source.get(*row.names.split())
        if value is not None or source.remarks:
            given = {name: source.given[name] for name in names if name in source.given}
            converted.update(given)
            result.settings.append(Setting(row.key, value, tuple(given.items()), row.note, tuple(source.remarks)))
    others = [row for row in rows if not row.key]
    for name, value in source.given.items():
        if name in converted:
            continue
        other = next((row for row in others if _matches(row, name) and (not row.when or row.when(source))), None)
        if name in mapped or (other and other.needed and _is_off(value, other.off)):
            result.unused.append(name)
        elif other is None:
            result.unknown.append(name)
        else:
            (result.lost if other.needed else result.needless).setdefault(other.note, []).append(name)
            if not other.supported:
                source.unsupported.append(f"{name} = {shown(value)}: {other.note}")
    result.unsupported = source.unsupported
    return result


def _matches(row: Row, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in row.names.split())


def _is_off(value: Any, off: tuple[Any, ...]) -> bool:
    """Whether the value is one of ``OFF`` or ``off``; True is not the number 1."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in (*OFF, *off))
