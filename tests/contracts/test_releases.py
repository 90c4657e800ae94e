"""Which releases of vLLM the extra `gpu` allows; ``releases.py`` downloads them and checks our calls against each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts import releases


def test_versions_before_output_spans_are_not_allowed() -> None:
    """``CompletionOutput.weight_versions`` and ``finish_weight_update(version)`` came with vLLM 0.32."""
    assert releases.allowed(["0.33.0", "0.31.0", "0.22.1", "0.32.0", "0.32.1"])[:2] == ["0.32.0", "0.32.1"]
    assert not releases.allowed(["0.31.0", "0.22.1"])


@pytest.mark.nightly
@pytest.mark.slow
def test_every_use_fits_every_release_that_the_extra_allows(tmp_path: Path) -> None:
    versions = releases.allowed(releases.published())
    assert versions
    wrong = {version: releases.misfits(releases.fetch(version, tmp_path)) for version in versions}
    assert not any(wrong.values()), "\n".join(
        f"vllm {version}: {what}" for version, all_ in wrong.items() for what in all_
    )
