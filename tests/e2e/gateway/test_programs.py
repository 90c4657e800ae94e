"""Runs with unmodified third-party programs are trained while weights change. tests/gateway/test_programs.py tests each
program alone."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Runs
from tests.e2e.gateway.installed import AGENTS, LIBRARIES, installed
from tests.e2e.gateway.sessions import audit, write_spec

pytestmark = [pytest.mark.stack, pytest.mark.nightly]

SESSIONS = 40
"""``python -m tests.e2e.gateway.campaign --sessions 200 --agents all`` has more."""


def test_programs_are_trained_and_every_token_is_accounted_for(shared_runs: Runs) -> None:
    there, missing = installed()
    programs = [kind for kind in there if kind not in LIBRARIES]
    if not programs:
        pytest.skip("; ".join(f"{kind}: {why}" for kind, why in missing.items()))
    ended = shared_runs.run("train", write_spec(shared_runs, SESSIONS, programs, AGENTS / "bin"), limit_s=900)
    assert ended.code == 0, ended.out + ended.err + shared_runs.logs()
    found = audit(shared_runs.newest())
    assert not found.problems, "\n".join([str(found), *found.problems])
    assert sum(found.sessions.values()) >= SESSIONS and found.updates > 0
    assert found.continued > 0, "calls continued earlier turns"
