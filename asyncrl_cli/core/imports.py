"""Imports of torch, transformers, DeepSpeed and vLLM, which take most of the time of a run's start."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED = ("mlflow", "scipy", "sklearn")
"""Packages that DeepSpeed's autotuner, vLLM's resampling of audio and transformers' assisted generation import if they
are installed; each takes a second or two."""


@contextmanager
def large_imports() -> Iterator[None]:
    """A block that imports such libraries and does nothing else; a fifth to a third faster (decision 0044).

    Within it packages of ``UNUSED`` that nothing has imported yet count as not installed, for all threads.
    """
    hidden = [name for name in UNUSED if name not in sys.modules]
    collecting = gc.isenabled()
    # Imports leave little garbage, and each collection would traverse all modules again.
    gc.disable()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: the import system's own mark
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        if collecting:
            gc.enable()
