"""`asyncrl convert`: converts configurations of other trainers to specs."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncrl_cli.cli.arguments import Group, add
from asyncrl_cli.cli.output import echo
from asyncrl_cli.core.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl_cli.convert.table import Trainer

app = typer.Typer(
    cls=Group, help="Convert a configuration of another trainer to a spec.", no_args_is_help=True, rich_markup_mode=None
)

Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="The spec to write. Default: standard output."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing spec with different content.")]


def verl(
    config: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG",
            help="A YAML file of verl, and overrides as on its command line (`key=value`). Or a shell script with its "
            "command (`run.sh`). `python3 -m verl.trainer.main_ppo` is skipped.",
        ),
    ],
    output: Output = None,
    force: Force = False,
) -> None:
    """Write a spec for a configuration of verl, with a comment for every key (docs/from-verl.md).

    Overrides without a file are applied to verl's defaults. Exit code: 0 when the spec is valid on a machine that has
    its model and data; 1 when the spec has to be changed first, or the run is not supported, such as one with audio; 2
    when the configuration cannot be read.
    """
    from asyncrl_cli.cli.launch_script import command_words
    from asyncrl_cli.convert.config import override, read_file
    from asyncrl_cli.convert.verl import ARGUMENT, INSTEAD, read_command_line, trainer_of

    name, line = read_command_line(command_words(config, ARGUMENT))
    file = _one_file([word for word in line if os.path.exists(word) or not ("=" in word or word.startswith("~"))])
    overrides = [word for word in line if word != file]
    values = override(read_file(file, INSTEAD) if file else {}, overrides)
    _convert(_label(file, len(overrides), "override"), trainer_of(name, values), values, output, force)


def trl(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="ARGUMENTS",
            help="A YAML or JSON file of arguments; `grpo` (the default), `rloo`, `ppo`, `async_grpo` or `gkd`; and "
            "arguments as `trl grpo` takes them (`--learning_rate 1e-6`). A whole command line such as `accelerate "
            "launch train.py --learning_rate 1e-6` works, too.",
        ),
    ],
    output: Output = None,
    force: Force = False,
) -> None:
    """Write a spec for TRL's arguments, with a comment for every argument (docs/from-trl.md).

    Accelerate sets the number of processes: add --num_processes N, or --accelerate_config FILE. Exit codes are the same
    as for `convert verl`.
    """
    from asyncrl_cli.cli.launch_script import command_words
    from asyncrl_cli.convert.config import read_file
    from asyncrl_cli.convert.trl import INSTEAD, TRAINERS, parse

    method, files, values = parse(command_words(arguments, "--"))
    file = _one_file(files)
    label = _label(file, len(values), "argument")
    _convert(label, TRAINERS[method], (read_file(file, INSTEAD) if file else {}) | values, output, force)


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
    _convert(", ".join(files) or "overrides", TRAINER, values, output, force)


def _one_file(files: Sequence[str]) -> str:
    """Return the only file, or empty text without one. Raises ``ConfigError`` for several files."""
    if len(files) > 1:
        message = f"these are {len(files)} configurations, and a spec comes from one"
        raise ConfigError(message, location=files[1][:60], hint="convert them one by one")
    return next(iter(files), "")


def _label(file: str, count: int, noun: str) -> str:
    """A short text about a configuration: a command line would be too long."""
    from asyncrl_cli.core.terminal import counted

    return f"{file} and {counted(count, noun)}" if file and count else file or counted(count, noun)


def _convert(label: str, trainer: Trainer, values: Mapping[str, Any], output: Path | None, force: bool) -> None:
    """Convert a configuration, write the spec, and print the remaining problems and the next commands.

    A spec without ``output`` is printed to standard output. Then all other text goes to standard error.
    """
    from asyncrl_cli.convert.table import PATHS, convert, spec_text
    from asyncrl_cli.spec.load import load_spec
    from asyncrl_cli.spec.problems import SpecError

    conversion = convert(values, trainer)
    text = spec_text(conversion, label, output.parent if output else Path())
    try:
        problems = load_spec(output or "spec.yaml", data=text.encode()).warnings
    except SpecError as error:
        problems = error.problems
    if output is None:
        echo(text.rstrip("\n"))
    else:
        _write(output, text.encode(), force)
    echo(f"{label}{f' -> {output}' if output else ''}: {conversion.summary}", err=output is None)
    is_valid = not conversion.unsupported
    for problem in problems:
        is_file = problem.path in PATHS or re.fullmatch(r"evaluation\.sets\.\w+\.data\.path", problem.path)
        if problem.severity == "error" and is_file:
            echo(f"  not on this machine: {problem.path}: {problem.message}", err=output is None)
        else:
            echo(str(problem), err=True)
            is_valid &= problem.severity != "error"
    for reason in conversion.unsupported:
        echo(f"error: not supported: {reason}", err=True)
    if output is not None and not conversion.unsupported:
        spec = shlex.quote(str(output))
        echo(f"next:\n  asyncrl validate-spec {spec}\n  asyncrl train {spec} --dry-run")
    if not is_valid:
        raise typer.Exit(1)


def _write(path: Path, content: bytes, force: bool) -> None:
    """Write a spec. Raises ``ConfigError`` if the file exists with other content, unless ``force``."""
    try:
        if not force and path.exists() and (not path.is_file() or path.read_bytes() != content):
            message = "the file exists, with other content"
            raise ConfigError(message, location=str(path), hint="name another file with -o, or use --force")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"the spec cannot be written: {reason}", location=str(path)) from error


add(
    app,
    ("verl", verl, "Convert verl's configuration.", "convert verl config.yaml trainer.nnodes=2 -o spec.yaml"),
    ("trl", trl, "Convert TRL's arguments.", "convert trl grpo config.yaml --num_processes 8 -o spec.yaml"),
    ("prime-rl", prime_rl, "Convert prime-rl's configuration.", "convert prime-rl rl.toml -o spec.yaml"),
    foreign=True,
)
