"""TRL's arguments as they are written: YAML or JSON files, and the command line of `trl grpo`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncrl_cli.convert.source import parse_value, read_file
from asyncrl_cli.convert.trl import DEFAULTS
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.flatten import flatten

_WORDS = ("trl", *DEFAULTS)


class Arguments(NamedTuple):
    """The trainer, the configuration files, and the arguments of the command line, which count for each file."""

    method: str
    files: list[str]
    values: dict[str, Any]


def parse(words: Sequence[str]) -> Arguments:
    """The words of a command line: `trl grpo`, files, `--config FILE`, `--name value…`, `--name=value`, `--flag`.

    Raises ``ConfigError`` for a word that is none of them.
    """
    method, files = "grpo", []
    options: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            current = options.setdefault(name.replace("-", "_"), [])
            current[:] = [text] if equals else []
        elif current is not None:
            current.append(word)
        elif word in _WORDS:
            method = word if word in DEFAULTS else method
        elif os.path.exists(word):
            files.append(word)
        else:
            hint = f"name a file, one of {', '.join(DEFAULTS)}, or --argument value"
            raise ConfigError(f"`{word}` is neither a file nor an argument of TRL", hint=hint)
    files += options.pop("config", [])
    values: dict[str, Any] = {}
    if accelerate := options.get("accelerate_config"):
        values |= _accelerate(accelerate[0])
    for name, texts in options.items():
        parsed = [parse_value(text) for text in texts]
        value: Any = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
        values |= flatten(value, name)
    return Arguments(method, files, values)


def _accelerate(name: str) -> dict[str, Any]:
    """The keys of Accelerate's configuration, if it is a file and not one of TRL's names such as `zero3`."""
    return read_file(name) if os.path.exists(name) else {}
