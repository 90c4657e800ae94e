"""The path of a test's journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl_cli.journal.schema import FILE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE
