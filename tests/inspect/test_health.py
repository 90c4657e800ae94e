"""Bad runs have the right findings, and good runs have none."""

from __future__ import annotations

from typing import Any

from asyncrl_cli.inspect.health import health

SPEC: dict[str, Any] = {"pipeline": {"groups_per_step": 32}}


def test_equal_groups_begin_and_end_at_their_steps() -> None:
    constant = [
        {"step": step, "reward/mean": 0.5, "reward/correct": 0.0, "reward/uniform_groups": 1.0, "train/updates": 0.0}
        for step in range(1, 5)
    ]
    teaching = [{**constant[0], "step": step, "reward/uniform_groups": 0.5, "train/updates": 1.0} for step in (5, 6, 7)]
    finding = health(constant, SPEC)[0]
    assert (finding.rule, finding.first_step, finding.last_step) == ("equal_groups", 1, None)
    assert [one.last_step for one in health(constant + teaching, SPEC)] == [4]
