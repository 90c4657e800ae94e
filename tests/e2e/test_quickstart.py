"""The main example of the README: what it learns."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import LIMIT_S, Runs
from tests.e2e.quickstart import assert_learned, train_quickstart

pytestmark = pytest.mark.stack


@pytest.mark.slow
def test_the_quickstart_learns(shared_runs: Runs) -> None:
    assert_learned(train_quickstart(shared_runs, limit_s=LIMIT_S))
