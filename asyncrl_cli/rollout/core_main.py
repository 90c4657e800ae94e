"""The main module of vLLM's core process: makes its imports faster (decision 0044) and joins messages (0079).

vLLM spawns the core, and ``multiprocessing`` has a spawned process run its parent's main module first. In a Ray actor
that is a file of Ray's; ``use_as_main`` names this module in its place.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from asyncrl_cli.core.imports import large_imports


def use_as_main() -> None:
    """Have the processes that this one spawns begin with this module."""
    sys.modules["__main__"].__spec__ = find_spec(__name__)


if __name__ == "__mp_main__":
    with large_imports():
        import vllm.v1.engine.core  # noqa: F401

        from asyncrl_cli.rollout.vllm_joined_outputs import join_outputs

        join_outputs()
