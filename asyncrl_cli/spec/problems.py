"""Mistakes in a spec, and their locations.

A problem names one key by its dotted path, and has a hint; ``load.py`` adds the location in the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl_cli.core.errors import Severity, UserError, diagnostic
from asyncrl_cli.core.terminal import counted, printable

MAX_DISPLAYED = 50
"""Largest number of problems in a message; the rest are only counted."""


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a file, with line and column (from 1), or an option of the command line."""

    file: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return ":".join(str(coordinate) for coordinate in (self.file, self.line, self.column) if coordinate is not None)

    @property
    def folder(self) -> Path:
        """The folder where relative paths written here start; for the command line, the current folder."""
        return Path() if self.line is None else Path(self.file).parent


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: an ``error``, which refuses the spec, or a ``warning``, which does not."""

    path: str
    message: str
    hint: str = ""
    severity: Severity = "error"
    file: str = ""
    line: int | None = None
    column: int | None = None

    def at(self, location: Location) -> Problem:
        """Return the same problem at a location."""
        return replace(self, file=location.file, line=location.line, column=location.column)

    def __str__(self) -> str:
        message = f"{self.path}: {self.message}" if self.path else self.message
        location = str(Location(self.file, self.line, self.column))
        lines = (line.replace("\n", r"\n") for line in (message, location, self.hint))
        return printable(diagnostic(self.severity, *lines))


class SpecError(UserError):
    """A spec that cannot run. ``problems`` has all problems, including warnings, in the order of the file."""

    exit_code = 2

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"the spec has {count_problems(self.problems)}")

    def __str__(self) -> str:
        blocks = [*map(str, self.problems[:MAX_DISPLAYED])]
        if len(self.problems) > MAX_DISPLAYED:
            blocks.append(f"... and {len(self.problems) - MAX_DISPLAYED:,} more")
        return "\n\n".join([*blocks, count_problems(self.problems)])

    def diagnostic(self) -> str:
        return str(self)

    def __reduce__(self) -> tuple[type[SpecError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


def count_problems(problems: Iterable[Problem]) -> str:
    """Such as ``2 errors, 1 warning``."""
    severities = [problem.severity for problem in problems]
    counts = [(name, severities.count(name)) for name in ("error", "warning") if name in severities]
    return ", ".join(counted(count, name) for name, count in counts)
