"""These tests start no run, and nothing that another one leaves is theirs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> None:
    """In place of the fixture that looks for what runs leave on the machine."""
