"""Starts vLLM's core process with its imports already made (decision 0044), and with joined messages (decision 0010).

On a CPU it is forked from the engine's actor, which has imported vLLM. On GPUs vLLM spawns it, and a spawned process
first runs its parent's main module. In a Ray actor that is Ray's own file; ``use_as_main`` puts this module in its
place.
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
    """Make processes that this process spawns run this module first."""
    sys.modules["__main__"].__spec__ = find_spec(__name__)


def fork_core() -> None:
    """Make vLLM fork its core from this process."""
    import vllm.v1.engine.utils

    from asyncrl_cli.rollout.vllm_joined_outputs import join_outputs

    join_outputs()
    vllm.v1.engine.utils.get_mp_context = _Forking


class _Core(ForkProcess):
    def run(self) -> None:
        # vllm_worker.py does this when it is imported. Here it was imported before the fork, which loses the setting.
        die_with(os.getppid())
        # The actor's objects must not be freed here: Ray would take locks that another thread held at the fork.
        gc.freeze()
        if "ray" in sys.modules:  # Ray has set this process's title, so vLLM's setproctitle cannot
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
