"""Unmodified agent libraries use tools through the gateway while the model that answers them is being trained."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Runs
from tests.e2e.gateway.sessions import audit, write_spec

pytestmark = [pytest.mark.stack, pytest.mark.nightly]

SESSIONS = 60
"""``python -m tests.e2e.gateway.campaign --sessions 500`` has more."""


def test_libraries_see_no_error_and_every_token_is_accounted_for(shared_runs: Runs) -> None:
    ended = shared_runs.run("train", write_spec(shared_runs, SESSIONS))
    assert ended.code == 0, ended.out + ended.err + shared_runs.logs()
    found = audit(shared_runs.newest())
    assert not found.problems, "\n".join([str(found), *found.problems])
    assert sum(found.sessions.values()) >= SESSIONS and len(found.sessions) == 5
    assert found.tool_calls > SESSIONS and found.continued > SESSIONS / 2, "tools were used over several turns"
    assert found.branches > 0, "smolagents rewords the model's replies"
    assert found.versions == SESSIONS // 20 and found.updates > 0
