"""A spec is a stack of layers: the files it extends, the file itself, then `--set` overrides.

Mappings are merged key by key; any other value replaces the lower layer's value. Each node keeps its location.

`pipeline.mode` and the algorithm presets decide the defaults of other keys. A layer that sets a preset drops the lower
layers' values of these keys, so `--set pipeline.mode=sync` works on any spec.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from asyncrl_cli.spec.algorithm import AlgorithmSpec, CorrectionSpec
from asyncrl_cli.spec.base import NUL, Section
from asyncrl_cli.spec.problems import Location, Problem
from asyncrl_cli.spec.yaml_nodes import MAX_DEPTH, YamlNode, read_yaml

SUFFIXES = (".yaml", ".yml", ".json")
MAX_FILES = 32
"""Largest number of files in a spec, and of entries in one `extends`. Limits are on size, not on time, so a spec is
accepted on every machine or on none (decision 0027)."""
SHOWN_CHARACTERS = 100
"""Largest number of characters of an override that a message quotes."""
MAX_BYTES = 128 * 1024
"""Largest size of a file in bytes: PyYAML reads this in about a second."""


def _following(section: type[Section]) -> tuple[str, ...]:
    return tuple(name for name, field in section.model_fields.items() if field.default_factory_takes_validated_data)


PRESETS = {
    "pipeline.mode": ("max_staleness", "weight_update", "partial_rollouts"),
    "algorithm.preset": _following(AlgorithmSpec),
    "algorithm.correction.preset": _following(CorrectionSpec),
}
"""The preset keys, each with the keys of its section that follow it: a layer that sets the preset drops them."""


def merge(base: YamlNode, over: YamlNode) -> YamlNode:
    """Merge the values of ``over`` into ``base``."""
    if over is base:
        return base
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    entries = base.value
    return replace(
        over,
        value=entries | {k: merge(entries[k], v) if k in entries else v for k, v in over.value.items()},
    )


class Layers:
    """Reads a file with everything that it extends; each file is read once.

    ``files`` has every file read, and ``problems`` receives their mistakes. ``partial``: a layer could not be read, so
    a missing key is no mistake of the user.
    """

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        self.files: list[Path] = []
        self.partial = False
        self._read_layers: dict[str, YamlNode | None] = {}

    def read(self, path: str, data: bytes | None = None) -> YamlNode | None:
        """Merge the file onto all files that it extends. None if the file itself cannot be read.

        ``data`` is the file's content if it is not yet written.
        """
        return self._read(path, blame=None, chain=(), data=data)

    def _read(
        self, path: str, blame: Location | None, chain: tuple[Path, ...], data: bytes | None = None
    ) -> YamlNode | None:
        """``blame``: the location of the `extends` that named this file; ``chain``: the files that led to it."""
        file = Path(os.path.realpath(path))
        key = "extends" if blame else ""
        location = blame or Location(path)

        def refuse(message: str, hint: str, problem_location: Location = location, key: str = key) -> YamlNode | None:
            self.problems.append(Problem(key, message, hint).at(problem_location))
            return None

        if file in chain:
            loop = " → ".join(step.name for step in (*chain[chain.index(file) :], file))
            return refuse(f"{path} extends itself: {loop}", "remove the circular `extends`")
        if path in self._read_layers:
            return self._read_layers[path]
        if data is None:
            if not os.path.exists(path):
                return refuse(f"{path} does not exist" if blame else "no such file", "check the path")
            if not os.path.isfile(path):
                has_spec = os.path.isfile(os.path.join(path, "spec.yaml"))
                hint = f"name its spec: {os.path.join(path, 'spec.yaml')}" if has_spec else "name a YAML file"
                if os.path.isfile(os.path.join(path, "manifest.json")):
                    hint = f"it is a run, which continues with: asyncrl resume {os.path.join(path, '')}"
                return refuse(f"{path} is not a file" if blame else "not a file", hint)
            if file.suffix not in SUFFIXES and (blame or Path(path).suffix in SUFFIXES):
                # Messages quote keys and values of a spec. They must not quote any other file that a spec names or
                # links to, such as /etc/shadow.
                leads = f"{path} leads to {file.name}, which" if Path(path).suffix in SUFFIXES else path
                return refuse(f"{leads} is not a YAML file", f"rename it to end in {', '.join(SUFFIXES)}")
            if len(self.files) >= MAX_FILES:
                return refuse(f"the spec has more than {MAX_FILES} files", "merge some of them")
            self.files.append(file)
            try:
                with file.open("rb") as opened:
                    data = opened.read(MAX_BYTES + 1)
            except OSError as error:
                return refuse(f"{path} cannot be read: {error.strerror}", "check its permissions")
        if len(data) > MAX_BYTES:
            hint = "put data into separate files"
            return refuse(f"the file has more than {MAX_BYTES:,} bytes", hint, Location(path, 1, 1), "")
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line_start = data.rfind(b"\n", 0, error.start) + 1
            error_location = Location(path, data.count(b"\n", 0, error.start) + 1, error.start - line_start + 1)
            return refuse("not UTF-8 text", "save the file as UTF-8", error_location, "")
        root = read_yaml(text, Location(path, 1, 1), self.problems)
        if root is None:
            return None
        if not isinstance(root.value, dict):
            content_text = "empty" if root.value is None else "not a mapping"
            return refuse(
                f"the file is {content_text}", "start with keys such as `model:` and `task:`", root.location, ""
            )
        self._read_layers[path] = merged = self._onto_bases(root, (*chain, file))
        return merged

    def _onto_bases(self, root: YamlNode, chain: tuple[Path, ...]) -> YamlNode:
        assert isinstance(root.value, dict)
        merged: YamlNode | None = None
        bases = [self._read(target, place, chain) for target, place in self._targets(root.value.pop("extends", None))]
        self.partial |= None in bases
        for layer in (*filter(None, bases), root):
            for preset in PRESETS:
                if merged and _child(layer, *preset.split(".")):
                    merged = _without_preset(merged, preset)
            merged = merge(merged, layer) if merged else layer
        return merged or root

    def _targets(self, parents: YamlNode | None) -> list[tuple[str, Location]]:
        if parents is None:
            return []
        targets = []
        nodes = parents.value if isinstance(parents.value, list) else [parents]
        if len(nodes) > MAX_FILES:
            problem = Problem("extends", f"names more than {MAX_FILES} files", "merge some of them")
            self.problems.append(problem.at(parents.location))
        for node in nodes[:MAX_FILES]:
            if isinstance(node.value, str) and NUL not in node.value:
                targets.append((os.path.normpath(node.location.folder / node.value), node.location))
                continue
            message = "must be the path of a spec, or a list of paths"
            if isinstance(node.value, str):
                message = "a path cannot contain a NUL character"
            self.problems.append(Problem("extends", message, "write `extends: base.yaml`").at(node.location))
            self.partial = True
        return targets


def override(root: YamlNode, assignment: str, problems: list[Problem]) -> YamlNode:
    """Apply one ``a.b=value`` of `--set` to the tree, and create missing mappings on the way."""
    path, equals, text = assignment.partition("=")
    location = Location(f"--set {path}")
    if not equals or not all(path.split(".")) or path.count(".") > MAX_DEPTH:
        hint = "write it like --set rollout.group_size=16"
        display_text = assignment if len(assignment) <= SHOWN_CHARACTERS else f"{assignment[:SHOWN_CHARACTERS]}…"
        problems.append(Problem("", "not a dotted key, `=` and a value", hint).at(Location(f"--set {display_text}")))
        return root
    if path.partition(".")[0] == "extends":
        hint = "write `extends` into a spec, and give that file to the command"
        problems.append(Problem(path, "only a file can extend another file", hint).at(location))
        return root
    value = read_yaml(text, origin=location, problems=problems, path=path)
    if path in PRESETS:
        root = _without_preset(root, path)
    if value is None:
        return root

    def placed(node: YamlNode, keys: list[str]) -> YamlNode:
        if not keys:
            return replace(value, key_location=location)
        key, *further_keys = keys
        child = node.child(key)
        if isinstance(node.value, list):
            if child is None:
                message = f"`{key}` is not an index of this list of {len(node.value)}"
                problems.append(Problem(path, message, "indices count from 0").at(location))
                return node
            items = list(node.value)
            items[int(key)] = placed(child, further_keys)
            return replace(node, value=items)
        inner = placed(child or YamlNode({}, location, location), further_keys)
        entries = node.value if isinstance(node.value, dict) else {}
        return replace(node, value=entries | {key: inner}, location=node.location if entries else location)

    return placed(root, path.split("."))


def _without_preset(root: YamlNode, preset: str) -> YamlNode:
    """The tree without the files' values of the keys that a preset decides. Values from `--set` stay."""
    section, _, _ = preset.rpartition(".")

    def is_kept(key: str, node: YamlNode) -> bool:
        return key not in PRESETS[preset] or node.location.file.startswith("--set")

    def without(node: YamlNode) -> YamlNode:
        if not isinstance(node.value, dict):
            return node
        return replace(node, value={key: child for key, child in node.value.items() if is_kept(key, child)})

    return root.changed(section.split("."), without)


def _child(node: YamlNode | None, *keys: str) -> YamlNode | None:
    for key in keys:
        node = node.value.get(key) if node is not None and isinstance(node.value, dict) else None
    return node
