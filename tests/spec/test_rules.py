"""What must fit together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.problems import Problem, SpecError

ROOT = Path(__file__).parents[2]
Write = Callable[..., Path]


def findings(path: Path, *overrides: str) -> list[Problem]:
    try:
        return list(load_spec(path, overrides).warnings)
    except SpecError as error:
        return list(error.problems)


def test_broken_rules_yaml_breaks_most_of_them() -> None:
    problems = findings(ROOT / "tests/data/broken_rules.yaml")
    assert [(p.line, p.path) for p in problems if p.severity == "error"] == [
        (4, "model.path"),
        (4, "model.path"),
        (7, "model.init.config.hidden_size"),
        (7, "model.init.config.num_key_value_heads"),
        (8, "model.init.tokenizer"),
        (9, "model.max_length"),
        (9, "model.max_length"),
        (11, "task.use"),
        (13, "data.train.path"),
        (14, "data.eval"),
        (18, "rollout.group_size"),
        (23, "rollout.engine_args.max-model-len"),
        (23, "rollout.engine_args.seed"),
        (23, "rollout.engine_args.scheduler_cls"),
        (26, "trainer.ranks"),
        (27, "trainer.minibatches"),
        (32, "pipeline.max_staleness"),
        (35, "pipeline.weight_update"),
        (37, "checkpoints.every"),
        (38, "stop.steps"),
    ]
    assert [p.path for p in problems if p.severity == "warning"] == [
        "rollout.dtype",
        "rollout.kv_cache_mb",
        "algorithm.correction.level",
        "trainer.gpus_per_rank",
        "trainer.tokens_per_microbatch",
        "trainer.schedule.warmup_updates",
        "evaluation.every",
        "checkpoints.every",
    ]
    assert all(problem.mend for problem in problems)


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (["model.path=null"], "model", "model.path (a saved one)"),
        (["model.path=/no/such"], "model.path", "there is no folder /no/such"),
        (["model.path=~/no/such"], "model.path", "there is no folder"),
        (["model.chat_template=no/such.jinja"], "model.chat_template", "there is no file /"),
        (["task.use=my/tasks.py:reward"], "task.use", "`my.tasks:reward`"),
        (["task.use=nothing"], "task.use", "Ready tasks: chain_sum, spell_backward"),
        (["task.use=null"], "task", "Give task.use (one task) or task.mix (several)."),
        (["task.mix=[{name: a, use: exact}]"], "task.use", "Set one of the two to null."),
        (["task.use=null", "task.mix=[{name: a, use: exakt}]"], "task.mix.0.use", "Did you mean `exact`?"),
        (
            ["task.use=null", "task.mix=[{name: a, use: exact}, {name: a, use: gym/any}]"],
            "task.mix.1.name",
            "names another task",
        ),
        (
            ["task.use=null", "task.options={a: 1}", "task.mix=[{name: a, use: exact}]"],
            "task.options",
            "to its members",
        ),
        (["data.train.path=."], "data.train.path", "is a folder"),
        (["model.max_length=600"], "model.max_length", "to 1024, or lower rollout.max_response_tokens to 88."),
        (["model.max_length=256"], "model.max_length", "Raise model.max_length to 1024."),
        (["rollout.group_size=512"], "rollout.max_running_rollouts", "Raise it to 512 or more"),
        (["trainer.minibatches=64"], "trainer.minibatches", "Use one of 1, 2, 4, 8, 16, 32."),
        (["trainer.offload=optimizer"], "trainer.offload", "Set it to none."),
        (
            ["trainer.offload=all", "trainer.zero_stage=2", "trainer.gpus_per_rank=1", "rollout.gpus_per_engine=1"],
            "trainer.offload",
            "Raise trainer.zero_stage to 3",
        ),
        (["trainer.attention=flash_attention_2"], "trainer.attention", "the trainer is on CPU in float32"),
        (["pipeline.mode=sync", "pipeline.max_staleness=1"], "pipeline.max_staleness", "mode sync means 0, not 1"),
        (["pipeline.partial_rollouts=true"], "pipeline.partial_rollouts", "is for mode sync"),
        (
            ["pipeline.mode=sync", "pipeline.partial_rollouts=true", "pipeline.max_staleness=0"],
            "pipeline.max_staleness",
            "Set it to 1 or leave it out.",
        ),
        (["pipeline.mode=sync", "pipeline.weight_update=keep"], "pipeline.weight_update", "means drain, not keep"),
        (["evaluation.prompts=300"], "evaluation.prompts", "Raise data.eval.size to 300"),
        (["rollout.engine_args={async_scheduling: true}"], "rollout.engine_args.async_scheduling", "Remove it"),
        (["trainer.gpus_per_rank=1"], "rollout.gpus_per_engine", "the engines are on CPU"),
    ],
)
def test_one_broken_rule(write: Write, overrides: list[str], path: str, words: str) -> None:
    (problem,) = findings(write(), *overrides)
    assert problem.path == path
    assert words in f"{problem.message} {problem.mend}"


def test_the_same_file_cannot_hold_out_prompts(write: Write) -> None:
    write("{}\n", "rows.jsonl")
    (problem,) = findings(
        write(
            "model: {path: a/b}\ntask: {use: m:f}\nstop: {steps: 3}\ndata:\n  "
            "train: {path: rows.jsonl}\n  eval: {path: ./rows.jsonl}\n"
        )
    )
    assert problem.severity == "warning" and problem.path == "data.eval.path"


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "async"])
def test_the_three_modes_fit_as_they_are(write: Write, mode: str) -> None:
    assert findings(write(), f"pipeline.mode={mode}") == []


@pytest.mark.parametrize(("running", "warned"), [(1280, False), (1281, True)])
def test_concurrency_that_staleness_can_never_use(write: Write, running: int, warned: bool) -> None:
    problems = findings(write(), f"rollout.max_running_rollouts={running}")
    assert bool(problems) is warned
    if problems:
        assert "staleness admits 1280" in problems[0].message
        assert problems[0].mend == "Lower it to 1280, or raise pipeline.max_staleness to 5."
        assert findings(write(), f"rollout.max_running_rollouts={running}", "pipeline.max_staleness=5") == []


def test_threads_are_counted_on_this_machine_only(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert findings(write()) == []
    assert [p.path for p in findings(write(), "trainer.ranks=2")] == ["trainer.threads_per_rank"]
    assert findings(write(), "trainer.ranks=2", "pipeline.mode=sync") == []
    assert findings(write(), "trainer.ranks=2", "cluster.address=auto") == []
    assert findings(write(), "trainer.ranks=2", "trainer.gpus_per_rank=1", "rollout.gpus_per_engine=1") == []


def test_the_specs_of_this_repository_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert load_spec(ROOT / "specs/quickstart.yaml").warnings == ()
