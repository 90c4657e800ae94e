"""mini-swe-agent, unmodified, is trained on bugfix-agent: it works in sandboxes, and hidden tests reward it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl_cli.journal.queries import group_record, snapshot
from asyncrl_cli.journal.schema import FILE, open_for_reading
from asyncrl_cli.records.generation import CONTEXT
from tests.e2e.conftest import ROOT, Runs, steps_of
from tests.e2e.gateway.installed import AGENTS, installed
from tests.e2e.gateway.sessions import warm_start

# What it joins is tested in test_bugfix.py (the task), test_episodes.py (commands in sandboxes) and
# tests/gateway/test_programs.py (mini-swe-agent at the gateway).
pytestmark = [pytest.mark.stack, pytest.mark.nightly]

HERE = Path(__file__).parent
STEPS, GROUPS, GROUP_SIZE = 2, 1, 4
COMMAND = (
    'mini -y --exit-immediately -c mini.yaml -c agent.step_limit=4 -o "$HOME/trajectory.json" -t "Fix calc.py." '
    '>"$HOME/log" 2>&1 || tail -n 3 "$HOME/log" >&2'  # it exits with an error when it reaches its limit of steps
)


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    """The sections of a spec that trains it. The files that the spec needs are written into its folder."""
    _, missing = installed()
    if reason := missing.get("mini-swe-agent"):
        pytest.skip(reason)
    template = ROOT / "templates/bugfix-agent"
    for file in (*template.glob("*.py"), HERE / "mini_bugfix.py", HERE / "mini_bugfix.jinja"):
        shutil.copy(file, tmp_path)
    given: dict[str, Any] = yaml.safe_load((template / "spec.yaml").read_text())
    options = given["task"]["options"] | {
        "command": COMMAND,
        "env": {"PATH": f"{AGENTS.resolve() / 'bin'}:{os.environ['PATH']}"},
    }
    start = warm_start(tmp_path, "conversation(rng)", "from mini_bugfix import conversation")
    return {
        "model": given["model"] | {"warm_start": start | {"steps": 150}, "chat_template": "mini_bugfix.jinja"},
        "task": {
            "use": "bugfix:BugfixByCommand",
            "options": options,
            "episode": {"max_calls": 6, "timeout_s": 300, "concurrency": 4},
            "sandbox": {"memory_mb": 2048, "readable": [str(AGENTS.resolve()), sys.base_prefix]},
        },
        "data": {"train": {"size": 1000}, "eval": {"size": 1}},
        "rollout": given["rollout"] | {"group_size": GROUP_SIZE, "max_running_rollouts": 8},
        "trainer": given["trainer"],
        "pipeline": {"groups_per_step": GROUPS, "max_staleness": 1},
        "evaluation": {"prompts": 1},
        "stop": {"steps": STEPS},
    }


def test_mini_swe_agent_is_trained_on_bugfix(tmp_path: Path, spec: dict[str, Any]) -> None:
    run = Runs(tmp_path).train(**spec)
    with closing(open_for_reading(run / FILE)) as journal:
        found = journal.execute(
            "SELECT groups.id, reward, metrics, failure FROM rollouts JOIN groups ON groups.id = group_id "
            "WHERE state = 'taken'"
        ).fetchall()
    assert len(found) == STEPS * GROUPS * GROUP_SIZE
    assert {failure or "" for *_, failure in found} == {""}
    assert {reward for _, reward, *_ in found} <= {0.0, 1.0}
    assert any(json.loads(metrics)["changed"] for *_, metrics, _ in found), "the agent has changed files"
    turns = []
    with snapshot(run / FILE) as connection:
        for group in {identity for identity, *_ in found}:
            for rollout in group_record(connection, group).rollouts:
                segments = [one for one in rollout.segments if one.rollout_id == rollout.rollout_id]  # not of a branch
                sampled = [segment.version != CONTEXT for segment in segments]
                turns.append(sum(now and not before for before, now in pairwise([False, *sampled])))
    assert len(turns) == len(found)
    assert max(turns) == 3, "look, change, finish, in one token-exact conversation"
    assert len(steps_of(run)) == STEPS
