"""Chooses the files of a conversion, checks the specs, and writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl_cli.convert.rows import Conversion, Trainer, convert
from asyncrl_cli.convert.write import CHECK, PATHS, spec_text
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.files import output_file
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.problems import Problem, SpecError

FOLDER = Path("converted")
"""Folder for the specs of several configurations, below the current folder."""


@dataclass(frozen=True, slots=True)
class Result:
    """A converted configuration. ``absent``: problems about files that this machine does not have."""

    origin: str
    target: Path | None
    text: str
    conversion: Conversion
    problems: tuple[Problem, ...]
    absent: tuple[Problem, ...]

    @property
    def valid(self) -> bool:
        """True if the spec is valid on a machine with its files, and trains what the configuration describes."""
        return not self.conversion.unsupported and not any(problem.severity == "error" for problem in self.problems)

    @property
    def summary(self) -> str:
        """The result in one line."""
        done = self.conversion
        lost = sum(map(len, done.lost.values()))
        counts = [
            f"{len(done.source.given)} keys read",
            f"{len(done.settings)} written",
            f"{len(done.remarks)} to check",
            f"{lost} without a counterpart",
            f"{len(done.unknown)} unknown",
        ]
        return f"{self.origin}{f' -> {self.target}' if self.target else ''}: {', '.join(counts)} (look for {CHECK})"


def targets(origins: Sequence[str], output: Path | None) -> list[Path | None]:
    """Return a file for each configuration; None is standard output. Raises ``ConfigError`` for equal file names."""
    folder = output if output and (len(origins) > 1 or output.is_dir()) else None
    if folder is None and len(origins) == 1:
        return [output]
    folder = folder or FOLDER
    if folder.exists() and not folder.is_dir():
        raise ConfigError("several specs need a folder, and this is a file", location=str(folder))
    found: dict[Path, str] = {}
    for origin in origins:
        target = folder / f"{Path(origin).stem or 'spec'}.yaml"
        if target in found:
            message = f"{found[target]} and {origin} would have the same name"
            raise ConfigError(message, location=str(target), hint="convert them one by one, with -o")
        found[target] = origin
    return list(found)


def convert_one(trainer: Trainer, origin: str, given: Mapping[str, Any], target: Path | None) -> Result:
    """Convert a configuration, and check its spec without writing it."""
    conversion = convert(given, trainer)
    text = spec_text(conversion, origin, target.parent if target else Path())
    try:
        problems = load_spec(target or "spec.yaml", data=text.encode()).warnings
    except SpecError as error:
        problems = tuple(error.problems)
    absent = tuple(
        one
        for one in problems
        if one.severity == "error"
        and (one.path in PATHS or re.fullmatch(r"evaluation\.sets\.\w+\.data\.path", one.path))
    )
    others = tuple(one for one in problems if one not in absent)
    return Result(origin, target=target, text=text, conversion=conversion, problems=others, absent=absent)


def write(results: Sequence[Result], *, force: bool) -> None:
    """Write the specs. Raises ``ConfigError`` before anything is written if a file exists with other content."""
    files = {result.target: result.text.encode() for result in results if result.target}
    for path, content in files.items():
        if not force and path.exists() and (not path.is_file() or path.read_bytes() != content):
            message = "the file exists, with other content"
            raise ConfigError(message, location=str(path), hint="name another file with -o, or use --force")
    for path, content in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with output_file(path) as file:
                file.write(content)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"the spec cannot be written: {reason}", location=str(path)) from error
