"""Hidden tests on the files that an episode has left, in a fresh sandbox that the policy has never seen.

The files' process gets the files alone; the tests are in a second one and only ask it to call functions
(``sandbox.run_tests``). So nothing that is written to a file can read a test, change it or report that it passed.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Mapping

from asyncrl_cli.sandbox.judge import Check, Kind, Limits, run

MOST_CHARACTERS = 2**18
"""Of a file: longer ones count as broken."""
_SLOTS = threading.Semaphore(max(os.cpu_count() or 1, 2))
"""Each verdict starts two processes: more at a time would only make each other slower, until their time is over."""
_PROGRAM = """
import importlib, sys, types
for _name, _text in {files!r}.items():
    with open(sys.path[0] + "/" + _name, "w", encoding="utf-8", newline="") as _file:
        _file.write(_text)
for _name in {modules!r}:
    globals()[_name] = types.SimpleNamespace(**vars(importlib.import_module(_name)))
"""
"""Writes the files and imports the modules. Tests cannot be handed a module, but an object with its names."""


def passing(files: Mapping[str, str], tests: Mapping[str, str], limits: Limits, kind: Kind) -> dict[str, bool]:
    """For each test, by name, whether it passes on these files.

    Raises ``SandboxError`` when no sandbox can be started.
    """
    if any(len(text) > MOST_CHARACTERS for text in files.values()):
        return dict.fromkeys(tests, False)
    results = _passing(tuple(files.items()), tuple(tests.values()), limits, kind)
    return dict(zip(tests, results, strict=True))


@functools.lru_cache(maxsize=1024)
def _passing(
    files: tuple[tuple[str, str], ...], tests: tuple[str, ...], limits: Limits, kind: Kind
) -> tuple[bool, ...]:
    """Rollouts of a group often leave the same files: they have the same verdict."""
    modules = [name.removesuffix(".py") for name, _ in files if name.endswith(".py")]
    program = _PROGRAM.format(files=dict(files), modules=modules)
    with _SLOTS:
        return tuple(run(program, [Check(test) for test in tests], limits, kind))
