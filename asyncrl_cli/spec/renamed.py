"""Keys of earlier versions. A spec that has one is refused with a hint that names its successor; the specs of recorded
runs, which are only read, are translated."""

from __future__ import annotations

from collections.abc import Mapping
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
"""The dotted key (below sections that have their present names), and its present name in the same section."""
REPLACED = {"rollout.max_failures": "max_failed_share"}
"""The same, where a value of the old key means nothing to the new one: recorded runs get the new one's default."""


def successor(path: str) -> tuple[str, str] | None:
    """The present key of an earlier one, and the hint that names it; None for any other key."""
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


def _mapping(value: Any) -> dict[str, Any]:
    value = value.value if isinstance(value, Node) else value
    return value if isinstance(value, dict) else {}
