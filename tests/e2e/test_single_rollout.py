"""Single rollouts with a running baseline: a run that is killed and resumed, and replayed to the same weights."""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from statistics import mean

import pytest

from asyncrl_cli.journal.rollout_rows import read_batch
from asyncrl_cli.journal.schema import FILE, open_for_reading
from tests.small_models import UNTRAINED

from .conftest import Runs, rows

pytestmark = [pytest.mark.stack, pytest.mark.rotating]

PROMPTS, GROUPS, HALF_LIFE = 24, 16, 2.0
REWARD = """
    def reward(prompt, response):
        return len(response) / 12 + int(prompt["prompt"][:-1]) / 24
"""


def test_running_baselines_survive_a_kill_and_are_replayed(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "lengths.py").write_text(textwrap.dedent(REWARD))
    lines = (json.dumps({"prompt": f"{number}>"}) for number in range(PROMPTS))
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    spec = runs.write_spec(
        name="single",
        model=UNTRAINED,
        task={"use": "lengths:reward"},
        data={"train": {"path": "prompts.jsonl"}, "eval": None},
        rollout={"group_size": 1, "max_running_rollouts": 32, "max_response_tokens": 12},
        algorithm={"preset": "single_rollout", "baseline_half_life": HALF_LIFE},
        pipeline={"mode": "async", "max_staleness": 1, "groups_per_step": GROUPS},
        checkpoints={"every": 2},
        stop={"steps": 60},
    )
    run = runs.kill_after(5, spec)
    steps = len(rows(run, "metrics.jsonl")) + 3
    runs.succeed("resume", run, "--steps", str(steps))
    # Every version of both drivers, from the rewards of both.
    replayed = runs.succeed("replay", run)
    assert f"all {steps} published versions" in replayed.out, replayed.out + replayed.err

    metrics = rows(run, "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, steps + 1))
    with closing(open_for_reading(run / FILE)) as journal:
        batches = [read_batch(journal, step) for step in range(steps)]
    visits: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for batch, row in zip(batches, metrics, strict=True):
        rewards = {group.group_id: group.known_rewards[0] for group in batch.groups}
        known = {group.group_id: sorted(visits[group.uid], reverse=True) for group in batch.groups}
        gaps = []
        for group_id, earlier in known.items():
            weighted = [(2 ** (-age / HALF_LIFE), reward) for age, (_, reward) in enumerate(earlier)]
            total = mean(rewards.values()) + sum(weight * reward for weight, reward in weighted)
            gaps.append(abs(rewards[group_id] - total / (1 + sum(weight for weight, _ in weighted))))
        assert row["train/baseline_groups"] == sum(map(bool, known.values()))
        assert row["train/baseline_error"] == pytest.approx(mean(gaps), rel=1e-9)
        for group in batch.groups:
            visits[group.uid].append((group.group_id, rewards[group.group_id]))
    assert metrics[0]["train/baseline_groups"] == 0 and metrics[-1]["train/baseline_groups"] == GROUPS
    assert all(row["train/updates"] == 1 and row["train/gradient_norm"] > 0 for row in metrics)
