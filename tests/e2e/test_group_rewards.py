"""A run on a mix of a task that compares the responses of a group and a reward function written for TRL. Both return
None for some responses."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from contextlib import closing

import pytest

from asyncrl_cli.journal.rollout_rows import read_batch
from asyncrl_cli.journal.schema import FILE
from tests.small_models import UNTRAINED

from .conftest import Runs, rows

pytestmark = [pytest.mark.stack, pytest.mark.rotating]

REWARDS = '''
import json
from pathlib import Path

from tests.small_models import UNTRAINED
from spell_backward import SpellBackward

CALLS = Path(__file__).with_name("group_calls.jsonl")


def noted(uid, responses, rewards):
    with CALLS.open("a") as file:
        file.write(json.dumps([uid, responses, rewards]) + "\\n")
    return rewards


class Ranked(SpellBackward):
    """The place of a response among all of its group, by length; None for one that ends with a vowel."""

    async def rewards(self, prompt, responses, finished):
        assert len(responses) == len(finished)
        order = sorted(responses, key=len)
        places = [None if text[-1:] in set("aeiou") else order.index(text) / 8 for text in responses]
        return noted(prompt.uid, responses, places)


def letters(prompts, completions, answer, uid, **columns):
    """The share of right letters; None for an empty completion."""
    assert prompts == [columns["word"][0] + ">"] * len(completions)
    pairs = zip(completions, answer)
    shares = [len(set(text) & set(right)) / len(set(right)) if text else None for text, right in pairs]
    return noted(uid[0], completions, shares)
'''


def test_groups_are_compared_and_masked_rollouts_are_not_trained_on(shared_runs: Runs) -> None:
    folder = shared_runs.folder
    (folder / "group_rewards.py").write_text(REWARDS)
    lines = [json.dumps({"word": word, "answer": word[::-1], "prompt": f"{word}>"}) for word in ("sun", "moon", "star")]
    (folder / "group_words.jsonl").write_text("\n".join(lines))
    words = {"path": "group_words.jsonl"}
    run = shared_runs.train(
        name="groups",
        model=UNTRAINED,
        task={
            "use": None,
            "mix": [
                {"name": "ranked", "use": "group_rewards:Ranked", "weight": 3},
                {"name": "trl", "use": "group_rewards:letters", "train": words, "eval": words},
            ],
        },
        data={"eval": {"size": 8}},
        evaluation={"samples": 2},
    )
    calls = defaultdict(list)
    for line in (folder / "group_calls.jsonl").read_text().splitlines():
        uid, responses, rewards = json.loads(line)
        assert len(responses) == len(rewards)
        calls[uid].append(rewards)
    assert {len(rewards) for of_prompt in calls.values() for rewards in of_prompt} >= {1, 2, 8}

    with closing(sqlite3.connect(run / FILE)) as journal:
        batches = [read_batch(journal, step) for step in range(4)]
        (asked_again,) = journal.execute("SELECT count(*) FROM rollouts WHERE masked AND reward IS NOT NULL").fetchone()
    assert asked_again == 0
    metrics = rows(run, "metrics.jsonl")
    for batch, row in zip(batches, metrics, strict=True):
        trained, masked = 0, 0
        for group in batch.groups:
            name, _, uid = group.uid.partition("/")
            assert list(group.rewards) in calls[uid], "one call had all rollouts of the group, in order"
            assert len([one for one in calls[uid] if len(one) == 8]) <= 1 or name == "trl", "no group was scored twice"
            masked += group.rewards.count(None)
            if len(set(group.known_rewards)) > 1:
                trained += sum(
                    len(rollout.ids)
                    for rollout, reward in zip(group.rollouts, group.rewards, strict=True)
                    if reward is not None
                )
        assert (row["reward/masked_rollouts"], row["tokens/trained"]) == (masked, trained)
    assert 0 < sum(row["reward/masked_rollouts"] for row in metrics) < 4 * 64
    assert sum(row["train/updates"] for row in metrics) > 0
