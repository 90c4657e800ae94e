"""Importing a user's own modules, which lie beside the spec."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType


def import_beside(name: str, folder: Path) -> ModuleType:
    """The module ``name``, sought in ``folder`` before Python's path. Raises whatever the import raises."""
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.insert(0, place)
    importlib.invalidate_caches()
    return importlib.import_module(name)
