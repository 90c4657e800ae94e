"""Real engines in the process of the tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from asyncrl_cli.rollout.engine_settings import CPU_ENVIRONMENT, ENVIRONMENT


@pytest.fixture(scope="module")
def forked_cores() -> Iterator[None]:
    """Engines fork vLLM's core, as in their actor: importing vLLM again would take longer than most tests."""
    os.environ.update(ENVIRONMENT | CPU_ENVIRONMENT)  # read when vLLM is imported
    from vllm.v1.engine import utils
    from vllm.v1.engine.core import EngineCoreProc

    from asyncrl_cli.rollout.vllm_core import fork_core

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "get_mp_context", utils.get_mp_context)  # restored afterwards
        patch.setattr(EngineCoreProc, "process_output_sockets", EngineCoreProc.process_output_sockets)
        # Another test may have imported vLLM without this setting, or deleted it by a patch that has ended.
        patch.setattr("torch._dynamo.config.disable", True, raising=False)
        fork_core()
        yield


@pytest.fixture
def restored_output() -> Iterator[None]:
    """Restores pytest's output after the test: workers redirect it."""
    saved = os.dup(1), os.dup(2)
    yield
    for target, descriptor in enumerate(saved, start=1):
        os.dup2(descriptor, target)
        os.close(descriptor)


@pytest.fixture(scope="module")
def loops() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as loops:
        yield loops
