"""The templates for third-party programs, as `asyncrl init` writes them: the programs run with a small saved model,
whose tokenizer and chat template do not shorten their prompts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from asyncrl_cli.journal.queries import RolloutRecord
from asyncrl_cli.records.generation import CONTEXT
from tests.e2e.conftest import Runs
from tests.e2e.gateway.installed import AGENTS, installed
from tests.e2e.journal import batched_groups, sequences_of

pytestmark = [pytest.mark.stack, pytest.mark.nightly]

MAX_LENGTH = 65536
GROUPS, GROUP_SIZE = 2, 2
HERE = {
    "model.max_length": MAX_LENGTH,
    "rollout.engines": 1,
    "rollout.gpus_per_engine": 0,
    "rollout.group_size": GROUP_SIZE,
    "rollout.max_running_rollouts": 4,
    "rollout.max_response_tokens": 64,
    "rollout.dtype": "float32",
    "trainer.ranks": 1,
    "trainer.gpus_per_rank": 0,
    "trainer.dtype": "float32",
    "trainer.tokens_per_microbatch": MAX_LENGTH,
    "pipeline.groups_per_step": GROUPS,
    "pipeline.max_staleness": 0,
    "cluster.gpu_memory_gb": "null",
    "task.episode.concurrency": 2,
    "evaluation.every": 0,
    "evaluation.prompts": 1,
    "checkpoints.every": 0,
    "tracking.mlflow": "false",
    "stop.steps": 1,
}
"""What differs from a run on eight GPUs."""
LONGEST = {"codex": 10_000, "claude-code": 10_000, "mini-swe-agent": 1_000}
"""The minimum number of tokens in a program's longest context."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the template `saved-model`, with more positions."""
    runs = Runs(tmp_path_factory.mktemp("models"))
    runs.succeed("init", "saved-model", "saved")
    folder = runs.folder / "saved/model"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_LENGTH}))
    return folder


@pytest.mark.parametrize("name", LONGEST)
def test_a_template_is_played_by_its_program_and_trained(name: str, runs: Runs, model: Path) -> None:
    _, missing = installed()
    if reason := missing.get(name):
        pytest.skip(reason)
    runs.succeed("init", name, "mine")
    own = {
        "model.path": model,
        "runs_dir": runs.folder,
        "task.sandbox.readable": json.dumps([str(AGENTS.resolve()), sys.base_prefix]),
        "task.options.env": json.dumps({"PATH": f"{AGENTS.resolve() / 'bin'}:{os.environ['PATH']}"}),
    }
    changes = (f"{key}={value}" for key, value in (HERE | own).items())
    run = runs.train_spec(runs.folder / "mine/spec.yaml", *changes)
    rollouts = [rollout for group in batched_groups(run) for rollout in group.rollouts]
    assert len(rollouts) == GROUPS * GROUP_SIZE
    assert {rollout.reward for rollout in rollouts} <= {0.0, 1.0}
    assert all(rollout.tokens > 0 and rollout.failure is None for rollout in rollouts), "each has called the model"
    assert max(map(longest_context, rollouts)) > LONGEST[name]


def longest_context(rollout: RolloutRecord) -> int:
    """The largest number of context tokens in one of its sequences."""
    return max(
        sum(len(segment.ids) for segment in segments if segment.version == CONTEXT)
        for segments in sequences_of(rollout).values()
    )
