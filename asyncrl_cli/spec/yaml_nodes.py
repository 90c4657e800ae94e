"""Reads YAML text as a tree of nodes that keep their locations in the file.

Scalars follow YAML 1.2: `1e-4` is a number, `no` and `2024-01-01` are text. `${env:NAME}` and `${env:NAME:-default}`
are replaced by environment variables before the scalar is interpreted, so a variable may hold a number; `$${env:` is a
literal `${env:`. Problems are collected, never raised: the reader continues after a mistake, with the text unchanged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import yaml

from asyncrl_cli.core.secrets import hide, remember
from asyncrl_cli.spec.problems import Location, Problem

MAX_VALUES = 10_000
"""Largest number of values in a document, with aliases expanded. Without this limit, a kilobyte of nested aliases could
expand to billions of values."""
MAX_DEPTH = 64
"""Deepest nesting, far below Python's recursion limit."""

_TAG = "tag:yaml.org,2002:"
SCALARS = {
    _TAG + "null": re.compile(r"(?:~|null|Null|NULL|)\Z"),
    _TAG + "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
    _TAG + "int": re.compile(r"(?:[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)\Z"),
    _TAG + "float": re.compile(
        r"(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
}
# The lookbehind and the excluded brace keep the search linear in texts with many dollars or unfinished variables.
_REFERENCE = re.compile(r"(?<!\$)(\$+)\{env:(?:([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\})?")


class _Loader(yaml.SafeLoader):
    """PyYAML's scanner and parser, with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}  # type: ignore[misc]  # PyYAML says instance variable.
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _TooLarge(_TOO_DEEP, self.get_mark())
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


_TOO_DEEP = f"nested too deeply, in more than {MAX_DEPTH} levels"


class _TooLarge(Exception):
    """The document exceeds a limit; reading stops here."""

    def __init__(self, message: str, mark: yaml.Mark) -> None:
        super().__init__(message)
        self.mark = mark


for _tag, _pattern in SCALARS.items():
    _Loader.add_implicit_resolver(_tag, _pattern, None)


Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value with its location, and the location of its key if it has a key."""

    value: dict[str, YamlNode] | list[YamlNode] | Scalar
    location: Location
    key_location: Location | None = None
    reference: str | None = None
    """The original text, if environment variables were replaced in it."""

    def plain(self, with_references: bool = False) -> Any:
        """Return the value without locations, as dicts, lists and scalars. ``with_references``: values of environment
        variables stay references."""
        if isinstance(self.value, dict):
            return {key: node.plain(with_references) for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain(with_references) for node in self.value]
        return self.reference if with_references and self.reference is not None else self.value

    def child(self, key: str) -> YamlNode | None:
        """Return the entry of a key, or of an index of a list."""
        if isinstance(self.value, dict):
            return self.value.get(key)
        if isinstance(self.value, list) and key.isdecimal() and int(key) < len(self.value):
            return self.value[int(key)]
        return None

    def changed(self, keys: list[str], change: Callable[[YamlNode], YamlNode | None]) -> YamlNode:
        """Return a copy of the tree with ``change`` applied to every node at the path ``keys`` (``*``: any key or
        index). If ``change`` returns None, the entry is removed."""
        head, *further_keys = keys

        def changed_child(child: YamlNode) -> YamlNode | None:
            return child.changed(further_keys, change) if further_keys else change(child)

        if isinstance(self.value, list) and head == "*":
            return replace(self, value=[node for node in map(changed_child, self.value) if node is not None])
        if not isinstance(self.value, dict):
            return self
        entries = {name: changed_child(child) if head in ("*", name) else child for name, child in self.value.items()}
        return replace(self, value={name: child for name, child in entries.items() if child is not None})

    def references(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the path (keys and indices) and the original text of each value with environment variables."""
        if self.reference is not None:
            yield path, self.reference
        children = dict(enumerate(self.value)) if isinstance(self.value, list) else self.value
        for name, node in children.items() if isinstance(children, dict) else ():
            yield from node.references((*path, str(name)))

    def location_of(self, path: str, *, key: bool = False) -> Location:
        """Return the location of a dotted path's value, or with ``key`` of its key.

        For a path that is not in the file, this is the location of the nearest key above it.
        """
        node, names = self, path.split(".") if path else []
        while names:
            # Longest first: a key may itself contain dots.
            for count in range(len(names), 0, -1):
                child = node.child(".".join(names[:count]))
                if child is not None:
                    break
            else:
                return node.key_location or node.location
            node, names = child, names[count:]
        return node.key_location or node.location if key else node.location


def read_yaml(text: str, origin: Location, problems: list[Problem], path: str = "") -> YamlNode | None:
    """Read one YAML document; None if its structure cannot be read (``problems`` says why).

    ``origin`` names the file; if it is a command-line option, every node has this option as its location. ``path`` is
    the dotted path of the document's root.
    """
    reader = _Reader(origin, problems)
    try:
        root = _Loader(text).get_single_node()
        return reader.node(root, path) if root else YamlNode(None, reader.location(0, 0))
    except yaml.reader.ReaderError as error:
        line, column = text.count("\n", 0, error.position), error.position - text.rfind("\n", 0, error.position) - 1
        character = f"U+{error.character:04X}" if isinstance(error.character, int) else repr(error.character)
        message = f"not valid YAML: the character {character} is not allowed"
        reader.report(path, message, reader.location(line, column), "remove it, or save the file as UTF-8 text")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = reader.location(mark.line, mark.column) if mark else origin
        hint = (
            "write `key: value`, indent with spaces, close brackets and quotes, and quote text with special characters"
        )
        if origin.file.endswith(".toml"):
            hint = f"prime-rl's TOML becomes a spec with: asyncrl convert prime-rl {origin.file}"
        context = f" {error.context}" if error.context else ""
        if error.context_mark and mark and error.context_mark.line != mark.line:
            context += f" that begins in line {error.context_mark.line + 1}"
        reader.report(path, f"not valid YAML{context}: {error.problem}", location, hint)
    except _TooLarge as error:
        location = reader.location(error.mark.line, error.mark.column)
        reader.report(path, str(error), location, "use fewer levels and aliases, or put data into files")
    return None


class _Reader:
    def __init__(self, origin: Location, problems: list[Problem]) -> None:
        self.origin = origin
        self.problems = problems
        self.open: list[yaml.Node] = []
        self.values = 0

    def location(self, line: int, column: int) -> Location:
        return self.origin if self.origin.line is None else Location(self.origin.file, line + 1, column + 1)

    def report(self, path: str, message: str, location: Location, hint: str = "") -> None:
        self.problems.append(Problem(path, message, hint).at(location))

    def node(self, source: yaml.Node, path: str) -> YamlNode:
        location = self.location(source.start_mark.line, source.start_mark.column)
        self.values += 1
        if self.values > MAX_VALUES:
            raise _TooLarge(f"more than {MAX_VALUES:,} values, with aliases written out", source.start_mark)
        if len(self.open) >= MAX_DEPTH:
            raise _TooLarge(_TOO_DEEP, source.start_mark)
        if any(source is parent for parent in self.open):
            self.report(path, "alias contains itself", location)
            return YamlNode(None, location)
        self.open.append(source)
        try:
            if isinstance(source, yaml.MappingNode):
                return YamlNode(self.mapping(source, path), location)
            if isinstance(source, yaml.SequenceNode):
                return YamlNode([self.node(item, f"{path}.{i}") for i, item in enumerate(source.value)], location)
            value, substituted = self.scalar(source.tag, text=source.value, path=path, location=location)
            return YamlNode(value, location, reference=source.value if substituted else None)
        finally:
            self.open.pop()

    def mapping(self, source: yaml.MappingNode, path: str) -> dict[str, YamlNode]:
        entries: dict[str, YamlNode] = {}
        for key, value in source.value:
            location = self.location(key.start_mark.line, key.start_mark.column)
            if key.tag != _TAG + "str":
                display_text = f"`{key.value}`" if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                hint = "put it in quotes; a list or mapping has a pair of brackets too many"
                self.report(path, message=f"keys must be text, not {display_text}", location=location, hint=hint)
                continue
            name = self.characters(key.value, path, location)
            key_path = f"{path}.{name}" if path else name
            if name in entries:
                message = f"duplicate key, first at {entries[name].key_location}"
                self.report(key_path, message=message, location=location, hint="remove one of the two")
            entries[name] = replace(self.node(value, key_path), key_location=location)
        return entries

    def scalar(self, tag: str, text: str, path: str, location: Location) -> tuple[Scalar, bool]:
        """A scalar's value, and True if environment variables were replaced in it."""
        expanded, substituted = self.expand(text, path, location)
        if substituted:
            tag = next((tag for tag, pattern in SCALARS.items() if pattern.match(expanded)), _TAG + "str")
        expanded = self.characters(expanded, path, location)
        if tag not in SCALARS and tag != _TAG + "str":
            self.report(path, message=f"unknown tag `{tag}`", location=location, hint="remove it")
        try:
            value = _convert(tag, expanded)
        except ValueError:
            self.report(path, f"`{hide(expanded)[:40]}` cannot be read as {tag.removeprefix(_TAG)}", location)
            return expanded, substituted
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            message = f"`{hide(expanded)[:40]}` does not fit into 64 bits"
            self.report(path, message=message, location=location, hint="use a smaller number")
        return value, substituted

    def characters(self, text: str, path: str, location: Location) -> str:
        """Join pairs of escaped surrogates, which JSON writes for rare characters. Half a pair is a mistake."""
        if text.isascii():
            return text
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            message = "half of a surrogate pair is not a character"
            self.report(path, message=message, location=location, hint="remove it")
            return text.encode("utf-8", "replace").decode()

    def expand(self, text: str, path: str, location: Location) -> tuple[str, bool]:
        """Replace environment variables. Returns the text, and True if any were replaced."""
        substituted = False

        def value(match: re.Match[str]) -> str:
            nonlocal substituted
            dollars, name, default = match.groups()
            if len(dollars) > 1:
                return match[0][1:]
            if name is None:
                message = "unfinished variable after `${env:`"
                self.report(path, message=message, location=location, hint="write ${env:NAME}")
                return match[0]
            if name not in os.environ and default is None:
                hint = f"export it, or write a default: ${{env:{name}:-default}}"
                self.report(path, message=f"environment variable {name} is not set", location=location, hint=hint)
                return match[0]
            substituted = True
            variable_value = os.environ.get(name, default or "")
            remember(name, variable_value)
            return variable_value

        return _REFERENCE.sub(value, text), substituted


def _convert(tag: str, text: str) -> Scalar:
    """Raises ``ValueError`` if the text does not fit the tag."""
    type_name = tag.removeprefix(_TAG)
    if type_name in ("null", "bool", "int", "float") and not SCALARS[tag].match(text):
        raise ValueError(text)
    match type_name:
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            digits = text.replace("_", "")
            return int(digits, 0) if digits[:2] in ("0x", "0o") else int(digits)
        case "float":
            return float(re.sub(r"\.(?=inf|nan)", "", text.lower().replace("_", "")))
    return text
