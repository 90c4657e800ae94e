"""Runs with unmodified third-party programs and agent libraries are trained while weights change.
tests/gateway/test_programs.py tests each program alone."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Runs
from tests.e2e.gateway.installed import AGENTS, LIBRARIES, installed
from tests.e2e.gateway.sessions import Audit, audit, write_spec

pytestmark = [pytest.mark.stack, pytest.mark.nightly]

LIBRARY_SESSIONS, PROGRAM_SESSIONS = 60, 40
"""``python -m tests.e2e.gateway.campaign`` has more."""


def test_libraries_see_no_error_and_every_token_is_accounted_for(shared_runs: Runs) -> None:
    found = audited(shared_runs, LIBRARY_SESSIONS, [])
    assert len(found.sessions) == 5 and found.versions == LIBRARY_SESSIONS // 20
    assert found.tool_calls > LIBRARY_SESSIONS, "tools were used"
    assert found.continued > LIBRARY_SESSIONS / 2, "over several turns"
    assert found.branches > 0, "smolagents rewords the model's replies"


def test_programs_are_trained_and_every_token_is_accounted_for(shared_runs: Runs) -> None:
    there, missing = installed()
    programs = [kind for kind in there if kind not in LIBRARIES]
    if not programs:
        pytest.skip("; ".join(f"{kind}: {why}" for kind, why in missing.items()))
    assert audited(shared_runs, PROGRAM_SESSIONS, programs).continued > 0, "calls continued earlier turns"


def audited(runs: Runs, sessions: int, programs: list[str]) -> Audit:
    """Train with these programs, or with all libraries, and compare their sessions with the journal."""
    ended = runs.run("train", write_spec(runs, sessions, programs, AGENTS / "bin"), limit_s=900)
    assert ended.code == 0, ended.out + ended.err + runs.logs()
    found = audit(runs.newest())
    assert not found.problems, "\n".join([str(found), *found.problems])
    assert sum(found.sessions.values()) >= sessions and found.updates > 0
    return found
