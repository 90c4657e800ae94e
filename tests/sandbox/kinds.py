"""The kinds of sandbox for commands, for tests that hold for each of them, and a mark for tests that use bubblewrap."""

from __future__ import annotations

import pytest

from asyncrl_cli.sandbox.trial import problem

_PROBLEMS = {kind: problem(kind) for kind in ("bubblewrap", "gvisor")}
_SKIPS = {
    kind: pytest.mark.skipif(bool(problem), reason=f"no {kind} sandbox here: {problem}")
    for kind, problem in _PROBLEMS.items()
}
KINDS = [pytest.param(kind, marks=skip) for kind, skip in _SKIPS.items()]
NEEDS_BUBBLEWRAP = _SKIPS["bubblewrap"]
