from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SMALLEST = "model: {path: org/model}\ntask: {use: chain_sum}\nstop: {steps: 10}\n"
"""The shortest spec that can run."""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a spec file: the smallest spec, or another text."""

    def write_spec(text: str = SMALLEST, name: str = "spec.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_spec
