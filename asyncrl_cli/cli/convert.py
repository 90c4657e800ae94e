"""`asyncrl convert`: converts configurations of other trainers to specs."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncrl_cli.cli.arguments import Group, add
from asyncrl_cli.cli.output import echo

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncrl_cli.convert.files import Result
    from asyncrl_cli.convert.rows import Trainer

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
    from asyncrl_cli.convert.source import override, read_file, words
    from asyncrl_cli.convert.verl import INSTEAD, OVERRIDE, read_line, trainer_of

    name, line = read_line(words(configs, OVERRIDE))
    files = [word for word in line if os.path.exists(word) or not ("=" in word or word.startswith("~"))]
    overrides = [word for word in line if word not in files]
    sources = {
        file or "overrides": (
            _label(file, len(overrides), "override"),
            override(read_file(file, INSTEAD) if file else {}, overrides),
        )
        for file in files or [""]
    }
    _convert(lambda values: trainer_of(name, values), sources, output, force)


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
    from asyncrl_cli.convert.source import read_file
    from asyncrl_cli.convert.trl import TRAINERS
    from asyncrl_cli.convert.trl_arguments import INSTEAD, parse

    method, files, values = parse(arguments)
    sources = {file: (_label(file, len(values), "argument"), read_file(file, INSTEAD) | values) for file in files} or {
        method: (_label("", len(values), "argument"), values)
    }
    _convert(lambda _: TRAINERS[method], sources, output, force)


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
    from asyncrl_cli.convert.prime_rl import TRAINER, read

    files, values = read(arguments)
    sources = {files[0] if files else "overrides": (", ".join(files) or "overrides", values)}
    _convert(lambda _: TRAINER, sources, output, force)


def _convert(
    trainer_of: Callable[[dict[str, Any]], Trainer],
    sources: dict[str, tuple[str, dict[str, Any]]],
    output: Path | None,
    force: bool,
) -> None:
    """Convert configurations. ``sources`` maps a file's name to a short text about its origin, and its keys."""
    from asyncrl_cli.convert.files import convert_one, targets

    results = []
    for (origin, values), target in zip(sources.values(), targets(list(sources), output), strict=True):
        results.append(convert_one(trainer_of(values), origin=origin, given=values, target=target))
    _finish(results, force)


def _label(file: str, count: int, kind: str) -> str:
    """A short text about the origin: a command line would be longer than the rest of the output."""
    counted = f"{count} {kind}{'' if count == 1 else 's'}"
    return f"{file} and {counted}" if file and count else file or counted


def _finish(results: list[Result], force: bool) -> None:
    """Write the specs, and print their paths, the remaining problems and the next commands.

    A result without a file is printed to standard output. Then all other text goes to standard error."""
    from asyncrl_cli.convert.files import write

    write(results, force=force)
    for result in results:
        if result.target is None:
            echo(result.text.rstrip("\n"))
        printed_to_error = result.target is None
        echo(result.summary, err=printed_to_error)
        for problem in result.absent:
            echo(f"  not on this machine: {problem.path}: {problem.message}", err=printed_to_error)
        for problem in result.problems:
            echo(str(problem), err=True)
        for reason in result.conversion.unsupported:
            echo(f"error: not supported: {reason}", err=True)
    usable = (result for result in results if result.target and not result.conversion.unsupported)
    if written := [shlex.quote(str(result.target)) for result in usable]:
        echo(f"next:\n  asyncrl validate-spec {' '.join(written)}\n  asyncrl train {written[0]} --dry-run")
    if not all(result.valid for result in results):
        raise typer.Exit(1)


add(
    app,
    ("verl", verl, "Convert verl's configurations.", "convert verl config.yaml trainer.nnodes=2 -o spec.yaml"),
    ("trl", trl, "Convert TRL's arguments.", "convert trl grpo config.yaml --num_processes 8 -o spec.yaml"),
    ("prime-rl", prime_rl, "Convert prime-rl's configuration.", "convert prime-rl rl.toml -o spec.yaml"),
    foreign=True,
)
