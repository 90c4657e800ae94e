"""A spec is a stack of layers: the files it extends, the file itself, then `--set` overrides.

Mappings merge key by key, everything else replaces what was below. Each node keeps the place it came from.

`pipeline.mode` is a preset, and so are those of algorithms: a layer that sets one starts from there, and what the
layers below say of the keys that follow from it is dropped. `--set pipeline.mode=sync` works on any spec.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from asyncrl_cli.spec.algorithm import AlgorithmSpec, CorrectionSpec
from asyncrl_cli.spec.problems import Place, Problem
from asyncrl_cli.spec.section import NUL, Section
from asyncrl_cli.spec.source import Node, read_yaml


def _following(section: type[Section]) -> tuple[str, ...]:
    return tuple(name for name, field in section.model_fields.items() if field.default_factory_takes_validated_data)


PRESETS = {
    "pipeline.mode": ("max_staleness", "weight_update", "partial_rollouts"),
    "algorithm.preset": _following(AlgorithmSpec),
    "algorithm.correction.preset": _following(CorrectionSpec),
}
"""Keys that are presets, each with those beside it whose defaults it decides, or that belong to one value of it."""


def merge(base: Node, over: Node) -> Node:
    """``over`` on top of ``base``."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    below = base.value
    return replace(over, value=below | {k: merge(below[k], v) if k in below else v for k, v in over.value.items()})


def read_layers(
    path: str, problems: list[Problem], files: list[Path], blame: Place | None = None, chain: tuple[Path, ...] = ()
) -> Node | None:
    """The file merged onto everything it extends; None when a layer cannot be read.

    ``files`` receives every file read. ``blame`` is the `extends` value that named this file, and ``chain`` the
    files that led to it.
    """
    place = blame or Place(path)
    key = "extends" if blame else ""
    file = Path(os.path.realpath(path))

    def refuse(message: str, mend: str = "", at: Place = place, key: str = key) -> Node | None:
        problems.append(Problem(key, message, mend).at(at))
        return None

    if file in chain:
        loop = [*chain[chain.index(file) :], file]
        return refuse(f"{path} extends itself: {' → '.join(step.name for step in loop)}", "Break the loop.")
    if not os.path.exists(path):
        return refuse(f"there is no file {path}" if blame else "there is no such file", "Check the path.")
    if not os.path.isfile(path):
        return refuse(f"{path} is not a file" if blame else "this is not a file", "Name a YAML file.")
    files.append(file)
    try:
        data = file.read_bytes()
    except OSError as error:
        return refuse(f"{path} cannot be read: {error.strerror}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line_start = data.rfind(b"\n", 0, error.start) + 1
        at = Place(path, data.count(b"\n", 0, error.start) + 1, error.start - line_start + 1)
        return refuse("this is not UTF-8 text", "Save the file as UTF-8.", at, "")
    root = read_yaml(text, Place(path, 1, 1), problems)
    if root is None:
        return None
    if not isinstance(root.value, dict):
        found = "empty" if root.value is None else "no mapping"
        return refuse(f"the file is {found}", "A spec starts with keys such as `model:` and `task:`.", root.place, "")
    parents = root.value.pop("extends", None)
    bases = [read_layers(target, problems, files, at, (*chain, file)) for target, at in _targets(parents, problems)]
    merged: Node | None = None
    for layer in [*bases, root]:
        if layer is None:
            return None
        for preset in PRESETS:
            if merged and _child(layer, *preset.split(".")):
                merged = _without_preset(merged, preset)
        merged = merge(merged, layer) if merged else layer
    return merged


def _targets(parents: Node | None, problems: list[Problem]) -> list[tuple[str, Place]]:
    """The files that an `extends` value names, each with its place."""
    if parents is None:
        return []
    targets = []
    for node in parents.value if isinstance(parents.value, list) else [parents]:
        if isinstance(node.value, str) and NUL in node.value:
            problems.append(Problem("extends", "holds a NUL character, which no path may").at(node.place))
        elif isinstance(node.value, str):
            targets.append((os.path.normpath(node.place.folder / node.value), node.place))
        else:
            message = "must be the path of a spec, or a list of them"
            problems.append(Problem("extends", message).at(node.place))
    return targets


def override(root: Node, assignment: str, problems: list[Problem]) -> Node:
    """The tree with one ``a.b=value`` of `--set` applied; missing mappings on the way are made."""
    path, equals, text = assignment.partition("=")
    place = Place(f"--set {path}")
    if not equals or not all(path.split(".")):
        mend = "Write --set rollout.group_size=16."
        problems.append(
            Problem("", "an override is a dotted key, `=` and a value", mend).at(Place(f"--set {assignment}"))
        )
        return root
    value = read_yaml(text, place, problems, path)
    if path in PRESETS:
        root = _without_preset(root, path)
    return _place(root, path.split("."), value, place, path, problems) if value else root


def _without_preset(root: Node, preset: str) -> Node:
    """The tree without the files' settings of what follows from a preset; those of other overrides stay."""

    def without(node: Node, keys: list[str]) -> Node:
        if not isinstance(node.value, dict):
            return node
        if keys[1:]:
            below = {keys[0]: without(node.value[keys[0]], keys[1:])} if keys[0] in node.value else {}
            return replace(node, value=node.value | below)
        kept = {
            key: child
            for key, child in node.value.items()
            if key not in PRESETS[preset] or child.place.file.startswith("--set")
        }
        return replace(node, value=kept)

    return without(root, preset.split("."))


def _child(node: Node | None, *keys: str) -> Node | None:
    for key in keys:
        node = node.value.get(key) if node is not None and isinstance(node.value, dict) else None
    return node


def _place(node: Node, keys: list[str], value: Node, place: Place, path: str, problems: list[Problem]) -> Node:
    if not keys:
        return replace(value, key_place=place)
    key, *rest = keys
    below = node.child(key) or Node({}, place, place)
    if isinstance(node.value, list):
        if node.child(key) is None:
            message = f"`{key}` is no index of this list of {len(node.value)}"
            problems.append(Problem(path, message, "Indices count from 0.").at(place))
            return node
        items = list(node.value)
        items[int(key)] = _place(below, rest, value, place, path, problems)
        return replace(node, value=items)
    inner = _place(below, rest, value, place, path, problems)
    entries = node.value if isinstance(node.value, dict) else {}
    return replace(node, value=entries | {key: inner}, place=node.place if entries else place)
