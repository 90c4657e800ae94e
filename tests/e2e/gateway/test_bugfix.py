"""The template bugfix-agent in real training: a policy uses the shell in sandboxes, and hidden tests reward it."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl_cli.journal.schema import FILE, open_for_reading
from tests.e2e.conftest import ROOT, Runs, steps_of
from tests.e2e.gateway.sessions import warm_start
from tests.sandbox.kinds import NEEDS_BUBBLEWRAP

pytestmark = [pytest.mark.stack, NEEDS_BUBBLEWRAP, pytest.mark.rotating]

IMPORTS, CONVERSATION = "from bugfix import TINY, Bugfix", "Bugfix(**TINY).demonstration(rng, True)"


def test_a_warm_started_policy_uses_the_shell(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    template = ROOT / "templates/bugfix-agent"
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    given: dict[str, Any] = yaml.safe_load((template / "spec.yaml").read_text())
    start = warm_start(tmp_path, CONVERSATION, IMPORTS)
    run = runs.train(
        model=given["model"] | {"warm_start": start | {"steps": 150}},
        task=given["task"],
        data={"train": given["data"]["train"], "eval": {"size": 8}},
        rollout=given["rollout"] | {"group_size": 4, "max_running_rollouts": 32},
        trainer=given["trainer"],
        pipeline=given["pipeline"] | {"groups_per_step": 4},
        evaluation={"prompts": 8},
        stop={"steps": 3},
    )
    with closing(open_for_reading(run / FILE)) as journal:
        found = journal.execute(
            "SELECT reward, metrics, failure FROM rollouts JOIN groups ON groups.id = group_id WHERE state = 'taken'"
        ).fetchall()
    assert len(found) == 3 * 4 * 4
    assert {failure or "" for _, _, failure in found} == {""}
    metrics = [json.loads(text) for _, text, _ in found]
    assert {reward for reward, _, _ in found} <= {0.0, 1.0}
    assert sum(one.get("changed", 0.0) for one in metrics) > 0, "files were changed with the shell"
    assert all(one.get("changed") for (reward, _, _), one in zip(found, metrics, strict=True) if reward == 1.0)
    assert sum(one.get("tool_calls", 0.0) for one in metrics) > len(metrics)
    assert len(steps_of(run)) == 3
