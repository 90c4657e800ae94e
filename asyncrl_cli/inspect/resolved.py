"""Reads a run's resolved spec as plain values. It also works for other releases of asyncrl, with other keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl_cli.core.secrets import hide_settings
from asyncrl_cli.runs.directory import RunDirectory


def resolved_spec(run: RunDirectory) -> dict[str, Any]:
    """Return the spec's sections without secrets; empty if the file is missing or damaged.

    References to environment variables stay as written.
    """
    from asyncrl_cli.spec.problems import Location
    from asyncrl_cli.spec.yaml_nodes import read_yaml

    file = run.path / "spec.yaml"
    try:
        root = read_yaml(file.read_text(), Location(str(file), 1, 1), problems=[])
    except (OSError, ValueError):
        return {}
    value = hide_settings(root.plain(with_references=True)) if root is not None else None
    return value if isinstance(value, dict) else {}


def spec_text(run: RunDirectory) -> str:
    """Return ``resolved_spec`` as YAML, or empty text if there is none."""
    import yaml

    spec = resolved_spec(run)
    return yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=110) if spec else ""


def value_at(spec: Mapping[str, Any], path: str) -> Any:
    """Return the value under a dotted key, or None."""
    value: Any = spec
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def engine_counts(spec: Mapping[str, Any]) -> tuple[int, int]:
    """Return the smallest and largest number of engines of a run. The default is 1."""
    minimum, maximum = (setting(spec, f"rollout.engines.{bound}", 0) for bound in ("min", "max"))
    fixed = setting(spec, "rollout.engines", 1)
    return (minimum, maximum) if minimum and maximum else (fixed, fixed)


def setting(spec: Mapping[str, Any], path: str, default: int) -> int:
    """Return the whole number under a dotted key, or ``default`` if there is none."""
    value = value_at(spec, path)
    return value if isinstance(value, int) else default
