"""Reads another trainer's configuration from files, scripts and command lines, as values by dotted key."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.files import read_regular
from asyncrl_cli.core.flatten import flatten

MAX_BYTES = 1 << 18
MAX_REFERENCES = 8
"""Largest depth of references to references."""
MAX_REFERENCE_LENGTH = 1 << 16
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?(\.?[\w.@]+)(?:,((?:[^${}]|\$\{[^{}]*\})*))?\}")
"""OmegaConf's `${a.b}`, `${.sibling}` and `${oc.select:a.b,default}`; a default may itself be a reference."""
NAME_KEYS = ("name", "tracking.experiment", "tracking.wandb.project")
"""Keys of a spec that are names."""


class ComputedValue(NamedTuple):
    """An expression in a program, as the value of a key."""

    text: str
    location: str


class _Loader(yaml.SafeLoader):
    """Reads `1e-6` as a number, as OmegaConf and transformers do. YAML 1.1 requires a decimal point."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            # Nested aliases repeat a value more often than any machine can hold.
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases are not read: write the value", mark)
        return super().compose_node(parent, index)


_Loader.yaml_implicit_resolvers = {key: list(pairs) for key, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


class ForeignConfig:
    """A configuration with its trainer's defaults.

    In names, `$` stands for ``prefix``. ``remarks`` collects sentences for the comments above keys of the spec, and
    ``unsupported`` the reasons why asyncrl cannot train this.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any],
        prefix: str,
        checks: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.values = {name: _resolved(name, value, values, MAX_REFERENCES) for name, value in values.items()}
        self.defaults = defaults
        self.remarks: dict[str, list[str]] = {}
        self.unsupported: list[str] = []
        self.prefix = prefix
        self._checks = checks

    def get(self, *names: str) -> Any:
        """Return the first value of these keys that is set and not null. Otherwise the first default, or None.

        Raises ``ConfigError`` for a computed value.
        """
        name, value = self._lookup(names)
        if isinstance(value, ComputedValue):
            message = f"`{name}` is {display_text(value)}, which the program computes"
            raise ConfigError(message, location=value.location, hint=f"add `--{name} VALUE` after the program")
        return value

    def name(self, key: str, *names: str) -> Any:
        """Return ``get`` for ``key``, a name. A computed name is left out, with a remark."""
        _, value = self._lookup(names)
        if not isinstance(value, ComputedValue):
            return value
        self.remark(key, f"the program computes it ({display_text(value)}): left out")
        return None

    def _lookup(self, names: Iterable[str]) -> tuple[str, Any]:
        full_names = [name.replace("$", self.prefix) for name in names]
        for values in (self.values, self.defaults):
            for name in full_names:
                if values.get(name) not in (None, "???"):
                    return name, values[name]
        return "", None

    def matching(self, pattern: str) -> list[str]:
        """Return the configuration's keys that match a pattern, where `*` is any text; a name matches itself."""
        pattern = pattern.replace("$", self.prefix)
        return [name for name in self.values if fnmatchcase(name, pattern)] if "*" in pattern else [pattern]

    def section(self, prefix: str) -> dict[str, Any] | None:
        """Return the keys below a prefix as one mapping of their last parts, or None if there are none."""
        return {name.removeprefix(prefix): self.values[name] for name in self.matching(f"{prefix}*")} or None

    def number(self, *names: str) -> float:
        """Return ``get`` as a number; 0 if it is not a finite number."""
        try:
            value = float(self.get(*names))
        except (TypeError, ValueError, OverflowError):
            return 0.0
        return value if math.isfinite(value) else 0.0

    def weights(self, name: str, parts: Sequence[str]) -> dict[str, float]:
        """Return the list ``name`` as a weight for each of ``parts``; 1.0 for all if it has another length. Raises
        ``ConfigError`` if a weight is not a number."""
        values = self.get(name)
        if not isinstance(values, list) or len(values) != len(parts):
            return dict.fromkeys(parts, 1.0)
        try:
            return {part: float(value) for part, value in zip(parts, values, strict=True)}
        except (TypeError, ValueError):
            raise ConfigError(
                f"{values} are not numbers", location=name, hint="give a number for each reward"
            ) from None

    def count(self, *names: str, minimum: int | None = None) -> int:
        """Return ``get`` as a whole number; 0 if it is not a finite number. At least ``minimum``."""
        value = int(self.number(*names))
        return value if minimum is None else max(value, minimum)

    def flag(self, *names: str) -> bool:
        """Return True if ``get`` is true, or a text from a command line that means true."""
        value = self.get(*names)
        return value.lower() in ("true", "1", "yes") if isinstance(value, str) else bool(value)

    def holds(self, condition: str) -> bool:
        """Return True if a table's condition holds: `A & B | C` is A, and B or C. `name` is a true value, `name=text`
        a value or an item of a list, and `!` negates either."""

        def is_true(term: str) -> bool:
            name, equals, text = term.removeprefix("!").partition("=")
            value = self.get(name)
            texts = map(str, value if isinstance(value, list) else [value])
            return (text in texts if equals else self.flag(name)) != term.startswith("!")

        return all(any(map(is_true, terms.split(" | "))) for terms in condition.split(" & "))

    def check(self, name: str, key: str = "", /, **fields: Any) -> None:
        """Add the remark ``name`` of the trainer's table, about its key of the spec or ``key``."""
        default_key, text, *_ = self._checks[name]
        self.remark(key or default_key, text.format(**fields))

    def remark(self, key: str, text: str) -> None:
        """Add a sentence about a key of the spec that the user should check."""
        if text not in self.remarks.setdefault(key, []):
            self.remarks[key].append(text)


def _resolved(name: str, value: Any, configuration: Mapping[str, Any], depth: int) -> Any:
    """The value with references to other keys replaced. References to unknown keys stay."""
    if not isinstance(value, str) or "${" not in value or depth == 0:
        return value

    def target(reference: re.Match[str]) -> Any:
        key, default = reference.groups()
        key = name.rpartition(".")[0] + key if key.startswith(".") else key
        if key in configuration:
            return _resolved(key, configuration[key], configuration, depth - 1)
        return reference[0] if default is None else _resolved(name, parse_value(default), configuration, depth - 1)

    if reference := _REFERENCE.fullmatch(value):
        return target(reference)
    text = _REFERENCE.sub(lambda reference: str(target(reference))[:MAX_REFERENCE_LENGTH], value)
    if len(text) > MAX_REFERENCE_LENGTH:
        raise ConfigError("the references to other keys are too long", location=name[:60])
    return text


def read_file(path: str, program_hint: str = "") -> dict[str, Any]:
    """Return the flattened keys of a YAML, JSON or TOML file; in TOML also the tables of a list.

    ``program_hint`` is the hint for a program, which cannot be read. Raises ``ConfigError``.
    """
    if Path(path).suffix in (".py", ".ipynb"):
        raise ConfigError("programs are not read", location=path[:120], hint=program_hint)
    data = content(path, MAX_BYTES)
    is_toml = Path(path).suffix == ".toml"
    try:
        # The libraries need minutes for what they then refuse.
        if re.search(rb"(?:[\[{]\s*){64}", data) or (
            is_toml and any(row.count(b".") > 64 for row in data.split(b"\n"))
        ):
            raise ValueError("it is nested more than 64 deep")
        document = tomllib.loads(data.decode()) if is_toml else yaml.load(data, _Loader)  # a subclass of SafeLoader
        flat = flatten(document, index_lists=is_toml) if document else {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        location = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        message = (
            f"the configuration is not {'TOML' if is_toml else 'YAML'}: {getattr(error, 'problem', None) or error}"
        )
        raise ConfigError(message, location=location, hint=program_hint) from error
    if not isinstance(document, dict):
        raise ConfigError("the configuration is not a mapping of keys", location=path, hint=program_hint)
    return flat


def content(path: str, max_bytes: int) -> bytes:
    """Return the bytes of a regular file of limited size. Raises ``ConfigError``."""
    try:
        return read_regular(path, max_bytes)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        hint = "name a file that exists, or paste the command or its arguments"
        raise ConfigError(f"the file cannot be read: {reason}", location=path[:120], hint=hint) from None


def parse_value(text: str) -> Any:
    """Read a value of a command line as YAML; if that fails, return the text."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def options_of(line: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the words before the first option, and the options' values (`--name value…`, `--name=value`, `--flag`)."""
    plain_words: list[str] = []
    options: dict[str, list[str]] = {}
    current = plain_words
    for word in line:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            current = options[name.replace("-", "_")] = [text] if equals else []
        else:
            current.append(word)
    return plain_words, options


def launched(line: Sequence[str], *programs: str) -> int:
    """Return the number of words up to the program that reads the arguments, or 0 if there is none.

    A program is one of ``programs``, a script, or the module of `python -m`.
    """
    for end, (previous, word) in enumerate(zip(("", *line), line, strict=False), start=1):
        if word in programs or (word.endswith(".py") and "=" not in word) or previous == "-m":
            return end
    return 0


def typed_options(options: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the flattened keys that options set. An option without a value is true; several values are a list."""
    values: dict[str, Any] = {}
    for name, texts in options.items():
        parsed = [parse_value(text) for text in texts] or [True]
        values |= flatten(parsed[0] if len(parsed) == 1 else parsed, name)
    return values


def override(values: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Apply Hydra's overrides: `key=value`, with `+` or `++` in front, and `~key`. Raises ``ConfigError``."""
    result = dict(values)
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        key = name.lstrip("+").removeprefix("~")
        if not key or not (equals or name.startswith("~")):
            message = f"`{assignment[:60]}` is neither a file nor key=value"
            raise ConfigError(message, hint="name a file that exists")
        result = {name: value for name, value in result.items() if name != key and not name.startswith(f"{key}.")}
        if not name.startswith("~"):
            result |= flatten(parse_value(text), key)
    return result


def display_text(value: Any) -> str:
    """Format a value for a comment: one line, at most 60 characters."""
    text = value.text if isinstance(value, ComputedValue) else json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
