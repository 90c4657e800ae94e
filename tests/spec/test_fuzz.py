"""Some of the fuzzer's mutated specs; `python -m tests.spec.fuzz` tries thousands."""

from __future__ import annotations

import pytest

from tests.spec.fuzz import fuzz


@pytest.mark.slow
def test_mutated_specs_are_accepted_or_refused() -> None:
    report = fuzz(130, seed=7)
    assert not report.faults, "\n\n".join(report.findings)
    assert report.outcome("accepted") > 5 and report.outcome("refused") > 50
