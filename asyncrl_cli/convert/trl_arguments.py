"""Parses TRL's arguments: YAML or JSON files, and the command line of `trl grpo` or a script."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncrl_cli.convert.source import launched, options_of, read_file, short, typed, words
from asyncrl_cli.convert.trl import DEFAULTS
from asyncrl_cli.core.errors import ConfigError

_LAUNCHER_OPTIONS = {
    "config_file": "accelerate_config",
    "zero_stage": "deepspeed_config.zero_stage",
    "nproc_per_node": "num_processes",
    "num_gpus": "num_processes",
}
"""Options of Accelerate, torchrun and DeepSpeed before the name of the script, and our names for them."""
INSTEAD = (
    "give the command line, `asyncrl convert trl grpo --learning_rate 1e-6 ...`, or have the script print its "
    "arguments as JSON (docs/from-trl.md)"
)


class Arguments(NamedTuple):
    """The trainer, the configuration files, and the command line's arguments, which apply to each file."""

    method: str
    files: list[str]
    values: dict[str, Any]


def parse(arguments: Sequence[str]) -> Arguments:
    """Parse a command line: `trl grpo`, files, `--config FILE`, `--name value…`, `--name=value`, `--flag`.

    It may start with a script and its launcher, such as `accelerate launch --num_processes 8 train.py`. Raises
    ``ConfigError`` for any other word.
    """
    line = words(arguments, "--")
    end = 0 if _begins_with_arguments(line) else launched(line, "trl")
    launcher, line = line[:end], line[end:]
    if launcher and launcher[-1].endswith(".py") and not line:
        raise ConfigError("programs are not read", location=short(launcher[-1]), hint=INSTEAD)
    _, options = options_of([word for word in launcher[:-1] if word != "-m"])
    options = {_LAUNCHER_OPTIONS.get(name, name): texts for name, texts in options.items()}
    plain, own = options_of(line)
    options |= own
    script = launcher[-1].removesuffix(".py").replace("/", ".").rpartition(".")[2] if launcher else ""
    method = script if script in DEFAULTS else "grpo"
    files = []
    for word in plain:
        if word in DEFAULTS:
            method = word
        elif os.path.exists(word):
            files.append(word)
        else:
            hint = f"name a file, one of {', '.join(DEFAULTS)}, or --argument value"
            raise ConfigError(f"`{short(word)}` is neither a file nor an argument of TRL", hint=hint)
    files += options.pop("config", [])
    values: dict[str, Any] = {}
    if (accelerate := options.get("accelerate_config")) and os.path.exists(accelerate[0]):
        values = read_file(accelerate[0])  # a file, and not one of TRL's names such as `zero3`
    return Arguments(method, files, values | typed(options))


def _begins_with_arguments(line: Sequence[str]) -> bool:
    first = line[0] if line else "--"
    return first.startswith("--") or first in DEFAULTS or (os.path.exists(first) and not first.endswith(".py"))
