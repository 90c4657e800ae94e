"""Rewards of turns, parts of the reward and a user's advantage function, in one run: killed, replayed and resumed."""

from __future__ import annotations

import json
import textwrap
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl_cli.journal.queries import group_record, snapshot
from asyncrl_cli.journal.rollout_rows import read_batch
from asyncrl_cli.journal.schema import FILE, open_for_reading
from asyncrl_cli.records.generation import CONTEXT
from tests.small_models import UNTRAINED

from .conftest import Runs, rows

pytestmark = [pytest.mark.stack, pytest.mark.rotating]

MODULE = """
    import json
    from pathlib import Path

    from asyncrl_cli.tasks.base import Step


    class Echo:
        def __init__(self, prompt):
            self.prompt, self.turn = prompt["prompt"], 0

        def reset(self):
            return [{"role": "user", "content": self.prompt}]

        def step(self, reply):
            self.turn += 1
            again = [{"role": "user", "content": f"turn {self.turn}>"}]
            text = reply["content"]
            # The second turn comes only after a short first reply.
            done = self.turn == 2 or len(text) % 3 == 0
            vowels = float(sum(map(text.count, "aeiou")))
            return Step(again, reward=len(text) / 10, done=done, metrics={"vowels": vowels})


    def per_token(rewards, lengths, metrics):
        with (Path(__file__).parent / "asked.jsonl").open("a") as file:
            shapes = [list(rewards.shape), list(lengths.shape), list(metrics["vowels"].shape)]
            file.write(json.dumps(shapes) + "\\n")
        centred = rewards / lengths + 0.01 * metrics["vowels"]
        return centred - centred.mean(dim=1, keepdim=True)
"""


def test_turns_and_parts_are_trained_and_replayed(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "turns.py").write_text(textwrap.dedent(MODULE))
    lines = (json.dumps({"prompt": f"{number}>"}) for number in range(40))
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    algorithm: dict[str, Any] = {
        "advantage": "turn_norm",
        "uniform_groups": "train",
        "reward_parts": {"reward": 1.0, "vowels": 0.1},
    }
    sections: dict[str, Any] = {
        "name": "turns",
        "model": {**UNTRAINED, "max_length": 128},
        "task": {"use": "turns:Echo"},
        "data": {"train": {"path": "prompts.jsonl"}, "eval": None},
        "rollout": {"group_size": 4, "max_running_rollouts": 32, "max_prompt_tokens": 16, "max_response_tokens": 12},
        "pipeline": {"mode": "async", "max_staleness": 1, "groups_per_step": 4},
        "checkpoints": {"every": 1},
        "stop": {"steps": 40},
    }
    run = runs.kill_after(2, runs.write_spec(**sections, algorithm=algorithm))
    killed_at = len(rows(run, "metrics.jsonl"))
    runs.succeed("replay", run)
    to = ("--set", "algorithm.advantage=turns:per_token", "--set", "algorithm.reward_aggregation=sum_then_normalize")
    runs.succeed("resume", run, "--steps", str(killed_at + 2), *to)

    metrics = rows(run, "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, killed_at + 3))
    assert all(row["train/missing_parts"] == 0 and row["train/updates"] > 0 for row in metrics)
    asked = [json.loads(line) for line in (tmp_path / "asked.jsonl").read_text().splitlines()]
    assert asked and all(shapes == [[4, 4]] * 3 for shapes in asked if shapes[0] != [2, 4]), "the check has two groups"

    counts = set()
    with closing(open_for_reading(run / FILE)) as journal:
        batches = [read_batch(journal, step) for step in range(killed_at + 2)]
    for group in (group for batch in batches for group in batch.groups):
        for rollout, reward, turns, measured in zip(
            group.rollouts, group.rewards, group.turns, group.metrics, strict=True
        ):
            counts.add(len(turns))
            assert sum(turn.reward for turn in turns) == reward
            assert measured.keys() == {"vowels"}
            for turn in turns:
                sequence = rollout.sequences[turn.branch]
                assert sequence.versions[turn.end - 1] != CONTEXT
                assert turn.end == len(sequence.ids) or sequence.versions[turn.end] == CONTEXT
            # A turn's reward is the length of its text: characters are tokens, and the end token is none.
            spans = [np.flatnonzero(np.diff(one.sampled.astype(int), prepend=0, append=0)) for one in rollout.sequences]
            replies = [int(end - start) for edges in spans for start, end in zip(edges[::2], edges[1::2], strict=True)]
            written = [round(turn.reward * 10) for turn in turns]
            assert all(length - 1 <= text <= length for length, text in zip(replies, written, strict=True))
    assert counts == {1, 2}
    with snapshot(run / FILE) as journal:
        shown = group_record(journal, batches[0].groups[0].group_id).rollouts
    assert [one.turns for one in shown] == list(batches[0].groups[0].turns)
    page = runs.run("inspect", "buffer", run, "--group", str(batches[0].groups[0].group_id))
    assert "rewards of its turns: " in page.out, page.out + page.err
