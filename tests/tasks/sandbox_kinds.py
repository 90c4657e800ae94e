"""The kinds of sandbox for commands, for tests that hold for each of them."""

from __future__ import annotations

import pytest

from asyncrl_cli.tasks.shell_sandbox.trial import problem

_PROBLEMS = {kind: problem(kind) for kind in ("bubblewrap", "gvisor")}
KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(bool(what), reason=f"no sandbox of {kind} here: {what}"))
    for kind, what in _PROBLEMS.items()
]
