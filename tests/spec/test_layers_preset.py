"""`pipeline.mode` is a preset of the layer that sets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl_cli.spec.load import load_spec

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "specs/quickstart.yaml"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], ("async", 2, "keep")),
        (["pipeline.mode=sync"], ("sync", 0, "drain")),
        (["pipeline.mode=one_step_off"], ("one_step_off", 1, "drain")),
        (["pipeline.mode=async"], ("async", 4, "keep")),
        (["pipeline.mode=async", "pipeline.max_staleness=3"], ("async", 3, "keep")),
        (["pipeline.max_staleness=3", "pipeline.mode=async"], ("async", 3, "keep")),
        (["pipeline.weight_update=recompute"], ("async", 2, "recompute")),
        (["pipeline.mode=sync", "pipeline.partial_rollouts=true"], ("sync", 1, "drain")),
        (["pipeline.partial_rollouts=true", "pipeline.mode=sync", "pipeline.max_staleness=2"], ("sync", 2, "drain")),
    ],
)
def test_an_override_of_the_mode_starts_from_its_preset(overrides: list[str], expected: tuple[str, int, str]) -> None:
    pipeline = load_spec(QUICKSTART, overrides).spec.pipeline
    assert (pipeline.mode, pipeline.max_staleness, pipeline.weight_update) == expected


def test_a_file_that_sets_the_mode_starts_from_its_preset(tmp_path: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text(f"extends: {QUICKSTART}\npipeline: {{mode: sync}}\n")
    assert load_spec(child).spec.pipeline.max_staleness == 0
    child.write_text(f"extends: {QUICKSTART}\npipeline: {{groups_per_step: 16}}\n")
    assert load_spec(child).spec.pipeline.max_staleness == 2
