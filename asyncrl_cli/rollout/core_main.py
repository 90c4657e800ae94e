"""How vLLM's core process begins: with its imports made (decision 0112), and joining its messages (0079).

On a CPU it is forked from the engine's actor, which has imported vLLM. On GPUs vLLM spawns it, and ``multiprocessing``
has a spawned process run its parent's main module first. In a Ray actor that is a file of Ray's; ``use_as_main`` names
this module in its place.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib.util import find_spec
from multiprocessing.context import ForkContext, ForkProcess

from asyncrl_cli.core.imports import large_imports
from asyncrl_cli.system.process_tree import die_with


def use_as_main() -> None:
    """Have the processes that this one spawns begin with this module."""
    sys.modules["__main__"].__spec__ = find_spec(__name__)


def fork_core() -> None:
    """Have vLLM fork its core from this process."""
    import vllm.v1.engine.utils

    from asyncrl_cli.rollout.vllm_joined_outputs import join_outputs

    join_outputs()
    vllm.v1.engine.utils.get_mp_context = _Forking


class _Core(ForkProcess):
    def run(self) -> None:
        # The kernel does not pass this on to a forked process, and vllm_worker.py, which asks for it, is imported.
        die_with(os.getppid())
        # Objects of the actor are not freed here: Ray would take locks for them that another thread held at the fork.
        gc.freeze()
        if "ray" in sys.modules:  # has set this process's title, so vLLM's setproctitle cannot
            from ray._raylet import setproctitle  # type: ignore[attr-defined]  # not in Ray's stub

            setproctitle("VLLM::EngineCore")
        super().run()


class _Forking(ForkContext):
    Process = _Core


if __name__ == "__mp_main__":
    with large_imports():
        import vllm.v1.engine.core  # noqa: F401

        from asyncrl_cli.rollout.vllm_joined_outputs import join_outputs

        join_outputs()
