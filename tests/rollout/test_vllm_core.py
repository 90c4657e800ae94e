"""The process that vLLM's core runs in, forked from the engine's actor; without vLLM."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

from asyncrl_cli.rollout import vllm_core

PARENT = """
import os, sys, time
from asyncrl_cli.rollout.vllm_core import _Forking

def core():
    print(os.getpid(), flush=True)
    time.sleep(20)
    print('it lives', flush=True)

_Forking().Process(target=core).start()
time.sleep(60)
"""


def test_a_forked_core_is_killed_with_its_actor() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        core = int(parent.stdout.readline())
        os.kill(core, 0)
        parent.kill()
        # Its standard output closes when the core, which has it too, has ended.
        assert parent.stdout.read() == ""


def test_a_forked_core_frees_no_object_of_its_actor() -> None:
    context = vllm_core._Forking()
    answers = context.SimpleQueue()
    process = context.Process(target=lambda: answers.put(gc.get_freeze_count()))
    process.start()
    frozen = answers.get()
    process.join(120)
    assert process.exitcode == 0
    assert frozen > len(gc.get_objects()) // 2
    assert gc.get_freeze_count() < frozen  # the actor's own collector still runs
