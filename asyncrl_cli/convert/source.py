"""Another trainer's configuration by dotted keys, with the trainer's defaults."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from asyncrl_cli.convert.script import ShellText, trainer_command
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.flatten import flatten

MAX_BYTES = 1 << 18
MAX_VALUES = 1 << 16
"""Largest number of values in a file with its YAML aliases expanded, and largest size of all resolved references."""
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?(\.?[\w.@]+)(?:,((?:[^${}]|\$\{[^{}]*\})*))?\}")
"""OmegaConf's `${a.b}`, `${.sibling}` and `${oc.select:a.b,default}`; a default may itself be a reference."""
MAX_REFERENCES = 8
"""Largest depth of references to references."""


class _Loader(yaml.SafeLoader):
    """Reads `1e-6` as a number, as OmegaConf and transformers do. YAML 1.1 requires a decimal point.

    Counts an alias as the values that it repeats, because comments and flattened keys repeat them.
    """

    values = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        sizes: dict[int, int] = self.__dict__.setdefault("sizes", {})
        event, old_count = self.peek_event(), self.values  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self.values += sizes.get(id(node), MAX_VALUES) if isinstance(event, yaml.AliasEvent) else 1
        sizes[id(node)] = self.values - old_count
        if self.values > MAX_VALUES:
            raise yaml.composer.ComposerError(None, None, "too many values, or an alias of itself", event.start_mark)
        return node


_Loader.yaml_implicit_resolvers = {key: list(pairs) for key, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
for _first in "-+.0123456789":
    _Loader.yaml_implicit_resolvers.setdefault(_first, []).append(("tag:yaml.org,2002:float", _NUMBER))


NAMES = ("name", "tracking.experiment", "tracking.wandb.project")
"""Keys of a spec that are names."""


class Source:
    """A configuration with its trainer's defaults.

    ``given`` has the keys of the configuration. ``remarks`` collects sentences for the comments above keys of the spec,
    and ``unsupported`` the reasons why asyncrl cannot train this.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._resolved_size = 0
        self.given = {name: self._resolved(name, value, given, MAX_REFERENCES) for name, value in given.items()}
        self.defaults = defaults
        self.remarks: dict[str, list[str]] = {}
        self.unsupported: list[str] = []

    def get(self, *names: str) -> Any:
        """Return the first value of these keys that is set and not null. Otherwise the first default, or None.

        Raises ``ConfigError`` for a value that only a run of a script gives.
        """
        name, value = self._lookup(names)
        if isinstance(value, ShellText):
            unknown, variable = value.unknown(), value.unknown().variable
            argument = f"{name}=VALUE" if "." in name else f"--{name} VALUE"
            raise ConfigError(
                f"`{name}` is `{short(value)}`, which only a run gives: {unknown.reason}",
                location=value.location,
                hint=f"add `{argument}`{f' or `{variable}=VALUE`' if variable else ''} after the script",
            )
        return value

    def text(self, key: str, *names: str) -> Any:
        """Return ``get`` for a path or a name, which becomes the value of ``key``.

        A variable that the script does not set becomes `${env:NAME}`, with a remark. Of a name, other unknown pieces
        are left out.
        """
        name, value = self._lookup(names)
        if not isinstance(value, ShellText):
            return value
        is_name = key in NAMES
        texts = []
        for segment in value.segments:
            if isinstance(segment, str):
                texts.append(segment)
            elif is_name or segment.variable:
                texts.append("" if is_name else f"${{env:{segment.variable}}}")
                self.remark(key, f"{segment.reason}: {'left out' if is_name else 'export it, or write the path'}")
            else:
                return self.get(name)
        return parse_value("".join(texts)) or None

    def _lookup(self, names: Iterable[str]) -> tuple[str, Any]:
        for values in (self.given, self.defaults):
            for name in names:
                if values.get(name) is not None and values.get(name) != "???":
                    return name, values[name]
        return "", None

    def matching(self, pattern: str) -> list[str]:
        """Return the given keys that match a pattern, where `*` is any text."""
        return [name for name in self.given if fnmatchcase(name, pattern)] if "*" in pattern else [pattern]

    def section(self, prefix: str) -> dict[str, Any] | None:
        """Return the keys below a prefix as one mapping of their last parts, or None if there are none."""
        return {name.removeprefix(prefix): self.given[name] for name in self.matching(f"{prefix}*")} or None

    def number(self, *names: str) -> float:
        """Return ``get`` as a number; 0 if it is not a finite number."""
        try:
            value = float(self.get(*names))
        except (TypeError, ValueError, OverflowError):
            return 0.0
        return value if math.isfinite(value) else 0.0

    def count(self, *names: str) -> int:
        """Return ``get`` as a whole number; 0 if it is not a finite number."""
        return int(self.number(*names))

    def flag(self, *names: str) -> bool:
        """Return True if ``get`` is true, or a text from a command line that means true."""
        value = self.get(*names)
        return value.lower() in ("true", "1", "yes") if isinstance(value, str) else bool(value)

    def remark(self, key: str, text: str) -> None:
        """Add a sentence about a key of the spec that the user should check."""
        if text not in self.remarks.setdefault(key, []):
            self.remarks[key].append(text)

    def _resolved(self, name: str, value: Any, configuration: Mapping[str, Any], depth: int) -> Any:
        """The value with references to other keys replaced. References to unknown keys stay."""
        if not isinstance(value, str) or "${" not in value or isinstance(value, ShellText) or depth == 0:
            return value

        def target(reference: re.Match[str]) -> Any:
            target_key = name.rpartition(".")[0] + reference[1] if reference[1].startswith(".") else reference[1]
            default = reference[0] if reference[2] is None else parse_value(reference[2])
            if target_key not in configuration and reference[2] is None:
                return reference[0]
            result = self._resolved(
                target_key if target_key in configuration else name,
                configuration.get(target_key, default),
                configuration,
                depth - 1,
            )
            self._resolved_size += 1 + len(result) if isinstance(result, str) else 1
            if self._resolved_size > MAX_VALUES:
                raise ConfigError("the references to other keys are too long", location=short(name))
            return result

        if reference := _REFERENCE.fullmatch(value):
            return target(reference)
        return _REFERENCE.sub(lambda reference: str(target(reference)), value)


SHELL_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
PROGRAMS = (".py", ".ipynb")


def words(arguments: Sequence[str], argument: str) -> list[str]:
    """Return the words of a command line, which may also be a single quoted argument or a shell script.

    ``argument`` is a pattern for the arguments of the command in a script. Raises ``ConfigError``.
    """
    if arguments and Path(arguments[0]).suffix in SHELL_SCRIPTS:
        is_argument = re.compile(argument).match
        return trainer_command(
            arguments[0],
            content(arguments[0], "script").decode(errors="surrogateescape"),
            arguments[1:],
            is_argument=lambda word: bool(is_argument(word)),
            launched=launched,
        )
    if len(arguments) != 1 or os.path.exists(arguments[0]):
        return list(arguments)
    try:
        line = shlex.split(arguments[0].replace("\\\n", " "), comments=True)
        # An override may have spaces, too: `data.train_files=[a, b]`.
        return line if launched(line, "trl") or "=" not in "".join(line[:1]) else list(arguments)
    except ValueError as error:
        raise ConfigError(f"the command line cannot be read: {error}", location=short(arguments[0])) from None


def launched(line: Sequence[str], *programs: str) -> int:
    """Return the number of words up to the program that reads the arguments, or 0 if there is none.

    A program is one of ``programs``, a script, or the module of `python -m`.
    """
    ends = (
        end
        for end, (before, word) in enumerate(zip(("", *line), line, strict=False), start=1)
        if word in programs or (word.endswith(".py") and "=" not in word) or before == "-m"
    )
    return next(ends, 0)


def short(text: str) -> str:
    """Shorten a text to 60 characters for messages."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_file(path: str, instead: str = "") -> dict[str, Any]:
    """Return the flattened keys of a YAML, JSON or TOML file; in TOML also the tables of a list.

    ``instead`` is the hint for a program, which cannot be read. Raises ``ConfigError``.
    """
    if Path(path).suffix in PROGRAMS:
        raise ConfigError("programs are not read", location=short(path), hint=instead)
    data = content(path, "configuration")
    try:
        toml = Path(path).suffix == ".toml"
        # The libraries need minutes for what they then refuse.
        if re.search(rb"(?:[\[{]\s*){64}", data) or (toml and any(row.count(b".") > 64 for row in data.splitlines())):
            raise ValueError("it is nested more than 64 deep")
        document = tomllib.loads(data.decode()) if toml else yaml.load(data, _Loader)  # a subclass of SafeLoader
        flat = flatten(document, index_lists=toml) if document else {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        location = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise ConfigError(
            f"the configuration is not {'TOML' if toml else 'YAML'}: {getattr(error, 'problem', None) or error}",
            location=location,
            hint=instead,
        ) from error
    if not isinstance(document, dict):
        raise ConfigError("the configuration is not a mapping of keys", location=path, hint=instead)
    return flat


def content(path: str, file_type: str) -> bytes:
    """Return the bytes of a regular file of limited size: a pipe could block. Raises ``ConfigError``."""
    hint = "name a file that exists"
    try:
        status = os.stat(path)
        largest = MAX_BYTES // 4 if file_type == "script" else MAX_BYTES
        if stat.S_ISREG(status.st_mode) and status.st_size <= largest:
            return Path(path).read_bytes()
        reason, hint = f"it is no regular file of at most {largest:,} bytes", "paste the command or its arguments"
        reason = "Is a directory" if stat.S_ISDIR(status.st_mode) else reason
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    raise ConfigError(f"the {file_type} cannot be read: {reason}", location=short(path), hint=hint)


def parse_value(text: str) -> Any:
    """Read a value of a command line as YAML; if that fails, or a piece is unknown, return the text."""
    if isinstance(text, ShellText):
        return text
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def options_of(line: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the words before the first option, and the options' values (`--name value…`, `--name=value`, `--flag`)."""
    plain: list[str] = []
    options: dict[str, list[str]] = {}
    current = plain
    for word in line:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            current = options.setdefault(name.replace("-", "_"), [])
            current[:] = [word.after_equals() if isinstance(word, ShellText) else text] if equals else []
        else:
            current.append(word)
    return plain, options


def typed(options: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the flattened keys that options set. An option without a value is true; several values are a list."""
    values: dict[str, Any] = {}
    for name, texts in options.items():
        parsed = [parse_value(text) for text in texts]
        values |= flatten(True if not parsed else parsed[0] if len(parsed) == 1 else parsed, name)
    return values


def override(values: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Apply Hydra's overrides: `key=value`, with `+` or `++` in front, and `~key`. Raises ``ConfigError``."""
    result = dict(values)
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        text = assignment.after_equals() if isinstance(assignment, ShellText) else text
        name = name.lstrip("+")
        removed = name.startswith("~")
        name = name.removeprefix("~")
        if not name or not (equals or removed):
            raise ConfigError(f"`{short(assignment)}` is neither a file nor key=value", hint="name a file that exists")
        for known in [known for known in result if known == name or known.startswith(f"{name}.")]:
            del result[known]
        if not removed:
            result |= flatten(parse_value(text), name)
    return result


def shown(value: Any) -> str:
    """Format a value for a comment: one line, at most 60 characters."""
    return short(json.dumps(value, ensure_ascii=True, default=str))
