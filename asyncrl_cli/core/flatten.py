"""Nested settings as dotted keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flatten(value: Any, prefix: str = "", index_lists: bool = False) -> dict[str, Any]:
    """Dotted keys with their values. Lists and empty mappings are values; with ``index_lists``, the items of a list of
    mappings get separate keys, such as ``mix.0.name``."""
    items: Mapping[Any, Any] | None = None
    if isinstance(value, Mapping) and value:
        items = value
    elif index_lists and isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        items = dict(enumerate(value))
    if items is None:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in items.items():
        flat |= flatten(item, f"{prefix}.{key}" if prefix else str(key), index_lists)
    return flat
