"""`asyncrl convert`: converts configurations of other trainers to specs."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from asyncrl_cli.cli.arguments import Group, add
from asyncrl_cli.cli.output import echo

if TYPE_CHECKING:
    from asyncrl_cli.convert.table import Conversion, Trainer
    from asyncrl_cli.spec.problems import Problem

FOLDER = Path("converted")
"""Folder for the specs of several configurations, below the current folder."""
app = typer.Typer(
    cls=Group, help="Convert a configuration of another trainer to a spec.", no_args_is_help=True, rich_markup_mode=None
)

Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        help="The spec to write; a folder if there are several. Default: standard output; for several, `converted`.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing spec with different content.")]


class Origin(NamedTuple):
    """A configuration to convert. ``label`` is a short text about it: a command line would be too long."""

    file: str
    label: str
    trainer: Trainer
    values: dict[str, Any]


class Result(NamedTuple):
    """A converted configuration. ``target`` None is standard output."""

    origin: Origin
    target: Path | None
    text: str
    conversion: Conversion
    problems: list[Problem]
    """Problems of the spec on a machine that has its model and data."""
    missing_files: list[Problem]
    """Problems about files that this machine does not have."""


def verl(
    configs: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG",
            help="YAML files of verl, and overrides as on its command line (`key=value`), which apply to all files. "
            "Or a shell script with its command (`run.sh`). `python3 -m verl.trainer.main_ppo` is skipped.",
        ),
    ],
    output: Output = None,
    force: Force = False,
) -> None:
    """Write a spec for each configuration of verl, with a comment for every key (docs/from-verl.md).

    Overrides without a file are applied to verl's defaults. Exit code: 0 when every spec is valid on a machine that has
    its model and data; 1 when a spec has to be changed first, or the run is not supported, such as one with audio; 2
    when a configuration cannot be read.
    """
    from asyncrl_cli.convert.config import override, read_file
    from asyncrl_cli.convert.shell import command_words
    from asyncrl_cli.convert.verl import ARGUMENT, INSTEAD, read_command_line, trainer_of

    name, line = read_command_line(command_words(configs, ARGUMENT))
    files = [word for word in line if os.path.exists(word) or not ("=" in word or word.startswith("~"))]
    overrides = [word for word in line if word not in files]
    origins = []
    for file in files or [""]:
        values = override(read_file(file, INSTEAD) if file else {}, overrides)
        label = _label(file, len(overrides), "override")
        origins.append(Origin(file or "overrides", label, trainer_of(name, values), values))
    _convert(origins, output, force)


def trl(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="ARGUMENTS",
            help="YAML or JSON files of arguments; `grpo` (the default), `rloo`, `ppo`, `async_grpo` or `gkd`; and "
            "arguments as `trl grpo` takes them (`--learning_rate 1e-6`), which apply to all files. A whole command "
            "line such as `accelerate launch train.py --learning_rate 1e-6` works, too.",
        ),
    ],
    output: Output = None,
    force: Force = False,
) -> None:
    """Write a spec for each file of TRL's arguments, with a comment for every argument (docs/from-trl.md).

    Accelerate sets the number of processes: add --num_processes N, or --accelerate_config FILE. Exit codes are the same
    as for `convert verl`.
    """
    from asyncrl_cli.convert.config import read_file
    from asyncrl_cli.convert.trl import INSTEAD, TRAINERS, parse

    method, files, values = parse(arguments)
    origins = []
    for file in files or [""]:
        file_values = read_file(file, INSTEAD) if file else {}
        label = _label(file, len(values), "argument")
        origins.append(Origin(file or method, label, TRAINERS[method], file_values | values))
    _convert(origins, output, force)


def prime_rl(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="ARGUMENTS",
            help="prime-rl's TOML files, and keys as on its command line (`--max-steps 9`). All files are one "
            "configuration: `rl.toml`, or the files of the trainer, the orchestrator and the inference server.",
        ),
    ],
    output: Output = None,
    force: Force = False,
) -> None:
    """Write a spec for a configuration of prime-rl, with a comment for every key (docs/from-prime-rl.md).

    Exit codes are the same as for `convert verl`.
    """
    from asyncrl_cli.convert.prime_rl import TRAINER, read_command_line

    files, values = read_command_line(arguments)
    file = files[0] if files else "overrides"
    _convert([Origin(file, ", ".join(files) or file, TRAINER, values)], output, force)


def _label(file: str, count: int, noun: str) -> str:
    from asyncrl_cli.core.terminal import counted

    return f"{file} and {counted(count, noun)}" if file and count else file or counted(count, noun)


def _targets(origins: list[Origin], output: Path | None) -> list[Path | None]:
    """A file for each configuration. Raises ``ConfigError`` for equal file names."""
    from asyncrl_cli.core.errors import ConfigError

    if len(origins) == 1 and not (output and output.is_dir()):
        return [output]
    folder = output or FOLDER
    if folder.exists() and not folder.is_dir():
        raise ConfigError("several specs need a folder, and this is a file", location=str(folder))
    files: dict[Path, str] = {}
    for origin in origins:
        target = folder / f"{Path(origin.file).stem or 'spec'}.yaml"
        if target in files:
            message = f"{files[target]} and {origin.file} would have the same name"
            raise ConfigError(message, location=str(target), hint="convert them one by one, with -o")
        files[target] = origin.file
    return list(files)


def _convert(origins: list[Origin], output: Path | None, force: bool) -> None:
    """Convert configurations, write the specs, and print the remaining problems and the next commands.

    A result without a file is printed to standard output. Then all other text goes to standard error.
    """
    results = [_result(origin, target) for origin, target in zip(origins, _targets(origins, output), strict=True)]
    _write(results, force)
    usable_specs, is_valid = [], True
    for result in results:
        conversion, is_printed = result.conversion, result.target is None
        if is_printed:
            echo(result.text.rstrip("\n"))
        echo(
            f"{result.origin.label}{'' if is_printed else f' -> {result.target}'}: {conversion.summary}", err=is_printed
        )
        for problem in result.missing_files:
            echo(f"  not on this machine: {problem.path}: {problem.message}", err=is_printed)
        for problem in result.problems:
            echo(str(problem), err=True)
        for reason in conversion.unsupported:
            echo(f"error: not supported: {reason}", err=True)
        if not is_printed and not conversion.unsupported:
            usable_specs.append(shlex.quote(str(result.target)))
        is_valid &= not conversion.unsupported and not any(one.severity == "error" for one in result.problems)
    if usable_specs:
        echo(f"next:\n  asyncrl validate-spec {' '.join(usable_specs)}\n  asyncrl train {usable_specs[0]} --dry-run")
    if not is_valid:
        raise typer.Exit(1)


def _result(origin: Origin, target: Path | None) -> Result:
    from asyncrl_cli.convert.table import PATHS, convert, spec_text
    from asyncrl_cli.spec.load import load_spec
    from asyncrl_cli.spec.problems import SpecError

    conversion = convert(origin.values, origin.trainer)
    text = spec_text(conversion, origin.label, target.parent if target else Path())
    try:
        problems = load_spec(target or "spec.yaml", data=text.encode()).warnings
    except SpecError as error:
        problems = error.problems
    missing_files = [
        problem
        for problem in problems
        if problem.severity == "error"
        and (problem.path in PATHS or re.fullmatch(r"evaluation\.sets\.\w+\.data\.path", problem.path))
    ]
    other_problems = [problem for problem in problems if problem not in missing_files]
    return Result(origin, target, text, conversion, other_problems, missing_files)


def _write(results: list[Result], force: bool) -> None:
    """Write the specs. Raises ``ConfigError`` before anything is written if a file exists with other content."""
    from asyncrl_cli.core.errors import ConfigError
    from asyncrl_cli.core.files import output_file

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


add(
    app,
    ("verl", verl, "Convert verl's configurations.", "convert verl config.yaml trainer.nnodes=2 -o spec.yaml"),
    ("trl", trl, "Convert TRL's arguments.", "convert trl grpo config.yaml --num_processes 8 -o spec.yaml"),
    ("prime-rl", prime_rl, "Convert prime-rl's configuration.", "convert prime-rl rl.toml -o spec.yaml"),
    foreign=True,
)
