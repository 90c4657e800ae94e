"""A run on rows of a Parquet file evaluated on other data sets, and resumed. Its model has
experts: engines prove each version with the tensor names of the model's checkpoints."""

from __future__ import annotations

import csv
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from asyncrl_cli.data.loader import PromptLoader
from asyncrl_cli.data.sources import read_source
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.spec.load import load_spec
from tests.spell_backward import SpellBackward

from .conftest import Runs, rows
from .journal import probe_gaps

pytestmark = [pytest.mark.stack, pytest.mark.rotating]

MIXTRAL = {
    "architecture": "mixtral",
    "config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "tokenizer": "characters",
}


def test_sets_and_a_resume_of_a_model_with_experts(shared_runs: Runs, tmp_path: Path) -> None:
    words = [
        {"word": prompt.content.removesuffix(">"), **prompt.fields}
        for prompt in SpellBackward().prompts("train", 300)
        if isinstance(prompt.content, str)
    ]
    parquet.write_table(pa.Table.from_pylist(words), shared_runs.folder / "words.parquet")
    with (shared_runs.folder / "sums.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("prompt", "answer"), ("1+2=", "3"), ("4-1=", "3")])
    (shared_runs.folder / "length_reward.py").write_text(
        "def reward(prompt, response):\n    return float(len(response) > 1)\n"
    )
    (shared_runs.folder / "length_reward_rows.py").write_text(
        "def rows(split, size):\n    return ({'prompt': f'{n}>', 'split': split} for n in range(10))\n"
    )
    spec = shared_runs.write_spec(
        name="data",
        model={"init": MIXTRAL, "path": None},
        # All its rewards are 0, and only the entropy bonus trains.
        algorithm={"uniform_groups": "train", "entropy_coef": 0.01},
        data={"train": {"path": "words.parquet", "template": "{word}>"}},
        evaluation={
            "every": 2,
            "samples": 2,
            "prompts": 8,
            "fix_version": True,
            "sets": {
                "sums": {"data": {"path": "sums.csv"}, "task": {"use": "length_reward:reward"}, "every": 3},
                "rows": {
                    "data": {"path": "length_reward_rows:rows", "size": 4},
                    "task": {"use": "length_reward:reward"},
                    "greedy": False,
                    "samples": 3,
                },
            },
        },
    )
    run = shared_runs.train_spec(spec)
    shared_runs.succeed("resume", run, "--steps", "6")

    metrics = rows(run, "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, 7))
    # If an engine loaded experts in the wrong order, log-probs would differ by 0.01 nats or more.
    assert max(probe_gaps(run).values()) < 1e-3
    gaps = [row["engine/logprob_gap_max"] for row in metrics if "engine/logprob_gap_max" in row]
    assert gaps
    assert max(gaps) < 1e-3

    loaded = load_spec(spec).spec
    prompts = read_source(loaded.data.train, "train", Path())
    loader = PromptLoader(prompts, loaded.seed, loaded.data.shuffle)
    with closing(sqlite3.connect(run / FILE)) as journal:
        drawn = journal.execute("SELECT uid, prompt, fields FROM groups ORDER BY id").fetchall()
        evaluated = journal.execute("SELECT step, kind, oldest, newest FROM evaluations").fetchall()
    assert len(drawn) >= 48
    for uid, content, fields in drawn:
        prompt = loader.next()
        assert (uid, json.loads(content), json.loads(fields)) == (prompt.uid, prompt.content, prompt.fields)

    both = {(step, kind) for step in (0, 2, 4, 6) for kind in ("greedy", "sampled", "rows:sampled")}
    sums = {(step, "sums:greedy") for step in (0, 3, 4, 6)}  # the run ended with step 4 before it was resumed
    assert {(step, kind) for step, kind, *_ in evaluated} == both | sums
    assert all(oldest == newest == step for step, _, oldest, newest in evaluated), "each is of one version"
    head, *samples = rows(run, "evaluations/step-000006-rows-sampled.jsonl")
    assert (head["prompts"], head["samples"], len(samples)) == (4, 3, 12)
    right = [sum(row["reward"] for row in samples[3 * n : 3 * n + 3]) for n in range(4)]
    assert head["pass_at"][0] == pytest.approx(head["accuracy"]) == pytest.approx(sum(right) / 12)
    assert head["pass_at"][2] == pytest.approx(sum(number > 0 for number in right) / 4)
