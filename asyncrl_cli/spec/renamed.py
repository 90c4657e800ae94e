"""Keys of earlier versions. A spec with such a key is refused, with a hint that names its successor. The specs of
recorded runs, which are only read, are translated. If a recorded spec lacks a key that is newer than the run, the key
gets the value that corresponds to what earlier versions did, which may differ from its default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from asyncrl_cli.spec.yaml_nodes import Node

RENAMED = {
    "algorithm.kl_in": "kl_placement",
    "algorithm.mask_cut": "mask_truncated",
    "algorithm.reference_every": "reference_update_every",
    "data.pools": "filter",
    "data.filter.retire_after": "solved_streak",
    "data.filter.revisit": "revisit_fraction",
    "evaluation.pin": "fix_version",
}
"""Earlier key -> present key. Both are dotted paths; the sections above the last part have their present names."""
REPLACED = {"rollout.max_failures": "max_failed_share"}
"""Likewise, but values of the earlier key have no meaning for the present one: recorded runs get its default."""
BEFORE = {"data.apply_chat_template": False}
"""Newer keys, and the value that corresponds to what earlier versions did. A recorded spec is complete, so it lacks no
other keys."""


def successor(path: str) -> tuple[str, str] | None:
    """For an earlier key its present key, and a hint that names it; None for any other key."""
    section, _, _ = path.rpartition(".")
    if path in REPLACED:
        present = f"{section}.{REPLACED[path]}"
        return present, f"replaced by `{present}`, whose values have another meaning: see docs/spec.md"
    if path not in RENAMED:
        return None
    present = f"{section}.{RENAMED[path]}"
    inner = [f"`{old.rpartition('.')[2]}` to `{new}`" for old, new in RENAMED.items() if old.startswith(f"{present}.")]
    return present, ", ".join([f"renamed to `{present}`", *inner])


def translate(spec: Node | Mapping[str, Any] | None) -> None:
    """Replace earlier keys in the spec of a recorded run by the present ones; ``spec`` is modified."""
    for path, present in (RENAMED | REPLACED).items():
        *above, name = path.split(".")
        section = _mapping(spec)
        for key in above:
            section = _mapping(section.get(key))
        if name in section:
            value = section.pop(name)
            if path in RENAMED:
                section.setdefault(present, value)
    for path, before in BEFORE.items():
        _set_default(spec, path.split("."), before)


def _set_default(spec: Node | Mapping[str, Any] | None, keys: list[str], value: bool) -> None:
    """Set a value of a recorded spec, unless it has the key."""
    for key in keys[:-1]:
        if key not in _mapping(spec):
            _mapping(spec)[key] = replace(spec, value={}, reference=None) if isinstance(spec, Node) else {}
        spec = _mapping(spec)[key]
    _mapping(spec).setdefault(keys[-1], replace(spec, value=value) if isinstance(spec, Node) else value)


def _mapping(value: Any) -> dict[str, Any]:
    value = value.value if isinstance(value, Node) else value
    return value if isinstance(value, dict) else {}
