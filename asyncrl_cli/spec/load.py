"""Loads a spec file as a checked ``ExperimentSpec``: first the layers, then types, then the rules between fields.

All mistakes are reported together, each as one problem: after a stage has reported a key, problems that later stages
find at this key are dropped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.flatten import flatten
from asyncrl_cli.core.secrets import hide
from asyncrl_cli.core.terminal import printable
from asyncrl_cli.core.user_code import missing_name
from asyncrl_cli.spec.base import MODULE_NAME, NUL
from asyncrl_cli.spec.changes import is_fixed, refuse_fixed
from asyncrl_cli.spec.data_sources import files_of, names_a_file
from asyncrl_cli.spec.inputs import CHARACTERS, SplitSpec
from asyncrl_cli.spec.keys import general, keys
from asyncrl_cli.spec.layers import MAX_BYTES, Layers, override
from asyncrl_cli.spec.problems import Location, Problem, SpecError
from asyncrl_cli.spec.rules import RULES
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.spec.validation_errors import explain
from asyncrl_cli.spec.yaml_nodes import SCALARS, YamlNode, read_yaml


@dataclass(frozen=True, slots=True)
class LoadedSpec:
    """A valid spec with absolute paths, the files that it was read from, and its warnings."""

    spec: ExperimentSpec
    files: tuple[Path, ...]
    warnings: tuple[Problem, ...]
    references: Mapping[tuple[str, ...], str]
    """The original texts of values with environment variables, by path. ``dump_spec`` writes them, not the values."""


USER_CODE = re.compile(
    r"task\.(mix\.\d+\.)?(use|options\.reward)|algorithm\.\w+|tracking\.monitors\.\d+|(?!model\.).*\.path(\.\d+)?"
)
"""Keys that may name the user's code as ``module:name``."""


def load_spec(
    path: str | Path, overrides: Sequence[str] = (), data: bytes | None = None, user_code: bool = False
) -> LoadedSpec:
    """Read and check a spec; ``overrides`` are ``a.b=value`` texts, applied in order.

    ``data`` is the file's content if it comes from elsewhere; ``path`` then gives only its name and folder. With
    ``user_code``, also look for the user's functions and classes, without importing them. Raises ``SpecError`` with
    every problem found.
    """
    problems: list[Problem] = []
    layers = Layers(problems)
    references: dict[tuple[str, ...], str] = {}
    folder = Path(path).absolute().parent if user_code else None
    root = layers.read(str(path), data)
    spec = _load(root, overrides=overrides, layers=layers, references=references, user_folder=folder)
    order = {str(file): rank for rank, file in enumerate(layers.files)}

    def where(problem: Problem) -> tuple[int, int, int]:
        # The location of an override is its text, which may contain a NUL.
        file = problem.file if NUL in problem.file else os.path.realpath(problem.file)
        return order.get(file, len(order)), problem.line or 0, problem.column or 0

    hidden = (
        replace(problem, message=hide(problem.message), hint=hide(problem.hint), file=hide(problem.file))
        for problem in problems
    )
    problems = sorted(dict.fromkeys(hidden), key=where)
    if spec is None or any(problem.severity == "error" for problem in problems):
        raise SpecError(problems)
    return LoadedSpec(spec, files=tuple(layers.files), warnings=tuple(problems), references=references)


def load_recorded(run: Path, overrides: Sequence[str] = ()) -> LoadedSpec:
    """Load the spec in a run's folder. Its ``runs_dir`` is the run's current parent folder, because runs can be moved.

    Raises ``ConfigError`` when the run's folder lacks a spec, and ``SpecError`` when the spec with the overrides is not
    valid.
    """
    file = run / "spec.yaml"
    if not file.exists():
        raise ConfigError(
            "the run's folder has no spec.yaml, where a run records its spec when it starts",
            location=str(run),
            hint="restore the file from a copy; `asyncrl report`, `watch` and `inspect` work without it",
        )
    try:
        recorded = load_spec(file, overrides)
    except SpecError:
        # Fixed keys come first: "X cannot be combined with Y" would suggest that correcting Y is enough.
        refuse_fixed(override.partition("=")[0] for override in overrides)
        raise
    references = {path: text for path, text in recorded.references.items() if path != ("runs_dir",)}
    return replace(recorded, spec=recorded.spec.model_copy(update={"runs_dir": run.parent}), references=references)


def _load(
    root: YamlNode | None,
    overrides: Sequence[str],
    layers: Layers,
    references: dict[tuple[str, ...], str],
    user_folder: Path | None,
) -> ExperimentSpec | None:
    if root is None:
        return None
    problems = layers.problems
    for assignment in overrides:
        root = override(root, assignment, problems)
    # Paths become absolute before the rules, which look at the files, and before the spec is written to another folder.
    for name, is_path in _path_keys().items():
        root = root.changed(name.split("."), partial(_absolute, is_path=is_path))
        if keys()[name].holder is SplitSpec:  # A recorded spec lists the files, so files added later change nothing.
            root = root.changed(name.split("."), partial(_expanded, shows_references=is_fixed(name)))
    for name, key in keys().items():
        if key.opens is key.field.annotation:  # A section that is null has its defaults.
            root = root.changed(name.split("."), lambda node: None if node.value is None else node)
    references.update(root.references())  # After the paths: a reference in a relative path now has the folder, too.
    blamed = [problem.path for problem in problems]

    def add(problem: Problem, key: bool) -> None:
        if not any(problem.path == path or problem.path.startswith(f"{path}.") for path in blamed):
            problems.append(problem.at(root.location_of(problem.path, key=key)))

    try:
        spec = ExperimentSpec.model_validate(root.plain())
    except ValidationError as error:
        for problem, is_key in explain(error, partial=layers.partial):
            add(problem, is_key)
        return None
    for rule in RULES:
        for problem in rule(spec):
            add(problem, key=False)
    if user_folder is not None:
        for name, target in _user_code(spec):
            if (reason := missing_name(target, user_folder)) is not None:
                add(Problem(name, *reason), key=False)
    if too_large := _too_large(root, spec, references):
        hint = "put data into separate files"
        problems.append(Problem("", f"the resolved spec has {too_large}", hint).at(root.location))
    return spec


def _user_code(spec: ExperimentSpec) -> Iterator[tuple[str, str]]:
    """Yield each key that names the user's code, and the name."""
    values = flatten(spec.model_dump(mode="json"), index_lists=True)
    lists = {key: value for key, value in values.items() if isinstance(value, list)}
    items = {f"{key}.{index}": item for key, value in lists.items() for index, item in enumerate(value)}
    for key, text in (values | items).items():
        if not (isinstance(text, str) and re.fullmatch(MODULE_NAME, text) and USER_CODE.fullmatch(key)):
            continue
        if not key.endswith("options.reward") or values[key.replace("options.reward", "use")] == "command":
            yield key, text


def _too_large(root: YamlNode, spec: ExperimentSpec, references: Mapping[tuple[str, ...], str]) -> str:
    """The limit that the spec exceeds when it is written as one file, or empty text.

    A spec beyond a limit could not be loaded again, so the run could not be resumed.
    """
    if len(str(root.plain())) < MAX_BYTES // 32:  # Fits even if every character is written as an escape.
        return ""
    text = dump_spec(spec, references)
    if len(text.encode()) > MAX_BYTES:
        return f"more than {MAX_BYTES:,} bytes"
    problems: list[Problem] = []
    read_yaml(text, Location("spec.yaml", 1, 1), problems)
    return problems[0].message if problems else ""


def _absolute(node: YamlNode, is_path: Callable[[str, str], bool]) -> YamlNode:
    """Make the node's path absolute, or each item of a list. Relative paths start at the folder of the node's file.

    ``is_path(text, path)`` tells paths from other texts, such as hub ids; ``path`` is the text's absolute form.
    """
    if isinstance(node.value, list):
        return replace(node, value=[_absolute(item, is_path) for item in node.value])
    if not isinstance(node.value, str) or not node.value or NUL in node.value:
        return node
    expanded_text = os.path.expanduser(node.value)
    path = os.path.abspath(node.location.folder / expanded_text)
    if not is_path(node.value, path):
        return node
    reference = node.reference
    if reference is not None and not os.path.isabs(expanded_text):
        reference = f"{_literal(os.path.abspath(node.location.folder))}/{reference}"
    return replace(node, value=path, reference=reference)


def _expanded(node: YamlNode, shows_references: bool) -> YamlNode:
    """Replace each pattern by its files. A pattern with a reference stays, because the file names would show the value
    of the environment variable, unless the values of this key are public anyway."""
    if isinstance(node.value, list):
        expanded_nodes = [_expanded(item, shows_references) for item in node.value]
        files = [
            file
            for node_or_list in expanded_nodes
            for file in (node_or_list.value if isinstance(node_or_list.value, list) else [node_or_list])
        ]
        return replace(node, value=files)
    if not isinstance(node.value, str) or NUL in node.value or (node.reference is not None and not shows_references):
        return node
    if (paths := files_of(node.value)) == [node.value]:
        return node
    node = replace(node, reference=None)
    return replace(node, value=[replace(node, value=path) for path in paths])


def _path_keys() -> dict[str, Callable[[str, str], bool]]:
    """The keys that may have paths, each with its ``is_path`` for ``_absolute``."""
    splits = [name for name, key in keys().items() if key.holder is SplitSpec and name.endswith(".path")]
    return {
        "model.path": looks_like_path,
        "algorithm.reference_path": looks_like_path,
        "model.lora.path": lambda *_: True,
        "model.init.tokenizer": looks_like_path,
        "model.chat_template": lambda *_: True,
        **dict.fromkeys(splits, lambda text, _: names_a_file(text)),
    }


def looks_like_path(text: str, path: str) -> bool:
    """True if ``text`` is a path and not a name: it starts like a path, or ``path`` or its parent folder exists."""
    if text == CHARACTERS:
        return False
    folder = os.path.dirname(path) if "/" in text else path
    return text.startswith(("/", "./", "../", "~")) or text in (".", "..") or os.path.exists(folder)


def _literal(text: str) -> str:
    """Escape ``${env:``, so reading the result gives the text itself."""
    return re.sub(r"\$+\{env:", r"$\g<0>", text)


def _is_public(key: str, value: object) -> bool:
    """True if a value is written although it came from an environment variable."""
    if is_fixed(key):
        return re.match(r"task\.(mix\.\d+\.)?(options|tools)\.", key) is None
    return general(key) in keys() and not isinstance(value, (str, Path))


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would not read as text.

    Unprintable characters are written as escapes, which YAML allows only between double quotes: otherwise PyYAML folds
    rare line breaks into spaces, and a terminal would get control characters.
    """

    def represent_text(self, text: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if printable(text) == text else '"')


for _tag, _pattern in SCALARS.items():
    _Dumper.add_implicit_resolver(_tag, _pattern, None)
_Dumper.add_representer(str, _Dumper.represent_text)


def resolved(loaded_spec: LoadedSpec) -> dict[str, Any]:
    """Return the complete spec with defaults as JSON values, with references as ``dump_spec`` writes them."""
    spec = loaded_spec.spec.model_dump(mode="json")
    values: dict[str, Any] = _with_references(spec, path=(), references=loaded_spec.references, text=str)
    return values


def _with_references(
    value: Any, path: tuple[str, ...], references: Mapping[tuple[str, ...], str], text: Callable[[str], str]
) -> Any:
    def inner_value(key: object, inner: Any) -> Any:
        return _with_references(inner, path=(*path, str(key)), references=references, text=text)

    if isinstance(value, dict):
        return {key: inner_value(key, inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [inner_value(index, inner) for index, inner in enumerate(value)]
    if path in references and not _is_public(".".join(path), value):
        return references[path]
    return text(str(value)) if isinstance(value, (str, Path)) else value


def dump_spec(spec: ExperimentSpec, references: Mapping[tuple[str, ...], str]) -> str:
    """Return the complete spec with defaults as YAML. Loading it gives the same spec.

    Values from environment variables are written as references, which keeps secrets out of files. Two kinds are written
    as values: numbers and switches, and keys that a resume must not change (``spec.changes.FIXED``).
    """
    values = _with_references(spec.model_dump(), path=(), references=references, text=_literal)
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
