"""Our mathematics compared with TRL's and verl's own functions: `make parity`.

Both are installed in a separate environment, and ordinary test runs collect nothing here. Every comparison uses
``same``, which fails above ``TOLERANCE``; a table of all comparisons is printed at the end.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import pytest
from torch import Tensor

TOLERANCE = 1e-5
"""Largest difference of two float32 results, relative to the largest number in theirs. A loss is a sum of terms that
cancel, so its difference is relative to the sum of their magnitudes; the gradient's magnitudes stand for these here."""

collect_ignore_glob = [] if find_spec("trl") and find_spec("verl") else ["test_*.py"]


class Same(Protocol):
    def __call__(
        self,
        ours: str,
        theirs: str,
        found: Tensor,
        expected: Tensor,
        *,
        of: Literal["result", "gradient"] = "result",
        size: Tensor | None = None,
    ) -> None: ...


TABLE = pytest.StashKey[dict[tuple[str, str], dict[str, float]]]()


@pytest.fixture
def same(pytestconfig: pytest.Config) -> Same:
    """Two names for the table, and their results or gradients."""
    table = pytestconfig.stash.setdefault(TABLE, {})

    def compare(
        ours: str, theirs: str, found: Tensor, expected: Tensor, *, of: str = "result", size: Tensor | None = None
    ) -> None:
        assert found.shape == expected.shape
        largest = (expected.abs().max() if size is None else size).clamp(min=1e-30).item()
        error = (found.double() - expected.double()).abs().max().item() / largest
        row = table.setdefault((ours, theirs), {})
        row[of] = max(error, row.get(of, 0.0))
        assert error < TOLERANCE, f"{ours} differs from {theirs} by {error:.1e} of the largest number"

    return compare


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if table := config.stash.get(TABLE, {}):
        terminalreporter.section(f"TRL {version('trl')}, verl {version('verl')}: largest relative differences")
        terminalreporter.write_line("| ours | theirs | result | gradient |\n|-|-|-|-|")
        for (ours, theirs), row in table.items():
            result, gradient = (f"{row[of]:.0e}" if of in row else "" for of in ("result", "gradient"))
            terminalreporter.write_line(f"| {ours} | {theirs} | {result} | {gradient} |".replace("0e+00", "0"))
