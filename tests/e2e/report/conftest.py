"""These tests start no run, so they do not check for leftover files."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> None:
    """Replaces the fixture that checks for leftover files of runs."""
