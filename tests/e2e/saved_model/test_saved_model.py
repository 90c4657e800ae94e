"""A saved model from `asyncrl init` to its export: byte-level BPE, a chat template with tools and reasoning, several
end tokens, and no supervised training. One run: every test checks its files, or serves or evaluates its models. A run
of the same template is resumed in test_rows.py."""

from __future__ import annotations

import json
import signal
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from asyncrl_cli.cli.app import app
from asyncrl_cli.core.intervals import wilson
from asyncrl_cli.journal.queries import GroupRecord

from ..conftest import Runs, rows
from ..gateway.test_episodes import PLAYERS
from ..journal import batched_groups
from ..served import logprobs_of, serving

pytestmark = pytest.mark.stack

STEPS = 3
SAME = 1e-3
"""Tolerance in nats between an engine's and transformers' log-probs in float32: they add in another order."""


@dataclass(frozen=True)
class Saved:
    """The initial model, the run, and the exported model."""

    initial: Path
    run: Path
    exported: Path
    dry: str
    groups: tuple[GroupRecord, ...]


def call(*arguments: str | Path) -> str:
    """The output of a command that starts no run, called in this process: its modules are mostly imported already."""
    ended = CliRunner().invoke(app, list(map(str, arguments)))
    assert ended.exit_code == 0, ended.output
    return ended.output


@pytest.fixture(scope="module")
def saved(shared_runs: Runs) -> Saved:
    """`init`, `train --dry-run`, `train`, `checkpoint export`: called one after the other, as by a user."""
    folder = shared_runs.folder / "mine"
    call("init", "saved-model", folder)
    settings = (f"stop.steps={STEPS}", f"runs_dir={shared_runs.folder}", "tracking.mlflow=false", "checkpoints.every=2")
    changes = [word for setting in settings for word in ("--set", setting)]
    dry = call("train", folder / "spec.yaml", *changes, "--dry-run")
    run = shared_runs.train_spec(folder / "spec.yaml", *settings)
    call("checkpoint", "export", run, "--to", folder / "exported")
    return Saved(folder / "model", run, folder / "exported", dry, tuple(batched_groups(run)))


def test_the_dry_run_shows_the_prompt_that_was_trained_on(saved: Saved) -> None:
    shown = " ".join(saved.dry.split())
    assert "by the chat template" in shown and "replies end at '<|endoftext|>', '<|im_end|>'" in shown
    tokenizer = AutoTokenizer.from_pretrained(saved.initial)
    for group in saved.groups:
        text = tokenizer.decode(group.prompt_ids)
        assert text == f"<|im_start|>user\n{group.prompt.content}<|im_end|>\n<|im_start|>assistant\n"


def test_it_was_trained(saved: Saved) -> None:
    metrics = rows(saved.run, "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert any(row["train/gradient_norm"] > 0 for row in metrics), "random weights get some numbers right: 0.1 for each"
    assert len(saved.groups) == STEPS * 8
    assert {group.row.version for group in saved.groups} <= set(range(STEPS))


def test_every_end_token_of_the_generation_config_ends_a_response(saved: Saved) -> None:
    ends = json.loads((saved.initial / "generation_config.json").read_text())["eos_token_id"]
    last = {
        int(rollout.segments[-1].ids[-1])
        for group in saved.groups
        for rollout in group.rollouts
        if rollout.finish_reason == "stop"
    }
    assert last and last <= set(ends)


def test_engine_and_trainer_have_the_same_logprobs(saved: Saved) -> None:
    gaps = [row.get("engine/logprob_gap_max") for row in rows(saved.run, "metrics.jsonl")]  # None: no token on-policy
    assert gaps[0] is not None and all(gap < SAME for gap in gaps if gap is not None)


def test_the_exported_model_is_the_trained_one_with_all_its_files(saved: Saved) -> None:
    final = saved.run / "model"
    ids = torch.tensor([saved.groups[0].prompt_ids])
    with torch.no_grad():
        before, trained, exported = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
            for folder in (saved.initial, final, saved.exported)
        )
    assert torch.equal(trained, exported)
    assert not torch.equal(trained, before)
    tokenizer = AutoTokenizer.from_pretrained(saved.initial)
    for folder in (final, saved.exported):
        same = AutoTokenizer.from_pretrained(folder)
        assert same.get_vocab() == tokenizer.get_vocab()
        assert same.chat_template == tokenizer.chat_template
        assert (same.eos_token, same.pad_token) == (tokenizer.eos_token, tokenizer.pad_token)
        name = "generation_config.json"
        assert (folder / name).read_bytes() == (saved.initial / name).read_bytes()


@pytest.mark.rotating
def test_its_checkpoint_is_served_and_a_kill_leaves_nothing(saved: Saved, shared_runs: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    call("checkpoint", "export", saved.run, "--step", "2", "--to", folder)
    with serving(shared_runs, saved.run, "--step", "2") as server:
        assert server.model == saved.run.name
        ids: Any = {"return_token_ids": True}
        (choice,) = (
            server.client()
            .completions.create(model=server.model, prompt="abc=", max_tokens=20, seed=3, logprobs=0, extra_body=ids)
            .choices
        )
        theirs: Any = choice
        expected = logprobs_of(folder, theirs.prompt_token_ids, theirs.token_ids)
        assert choice.logprobs is not None
        torch.testing.assert_close(choice.logprobs.token_logprobs, expected, atol=1e-4, rtol=0)
        server.end(signal.SIGKILL)


def test_evaluate_repeats_the_runs_own_evaluation_and_leaves_its_files_alone(saved: Saved, shared_runs: Runs) -> None:
    """The checkpoint of the last step: the weights, prompts, seeds and reward of the run's own evaluation."""
    own = {path: path.read_bytes() for path in saved.run.rglob("*") if path.is_file() and "logs" not in path.parts}
    chosen = ("--step", str(STEPS), "--sampled", "--json")
    ended = shared_runs.succeed("evaluate", saved.run, *chosen)
    document = json.loads(ended.out)
    (result,) = document["evaluations"]
    assert (document["step"], result["kind"]) == (STEPS, "offline:sampled")
    assert result["oldest"] == result["newest"] == STEPS
    low, high = result["intervals"]["accuracy"]
    assert low <= result["accuracy"] <= high

    expected = rows(saved.run, f"evaluations/step-{STEPS:06d}-sampled.jsonl")
    found = rows(saved.run, f"evaluations/step-{STEPS:06d}-offline-sampled.jsonl")
    assert [row["uid"] for row in found[1:]] == [row["uid"] for row in expected[1:]]
    equal = [one["response"] == other["response"] for one, other in zip(found[1:], expected[1:], strict=True)]
    assert sum(equal) > 0.9 * len(equal), "rounding may choose another token now and then, other weights always do"
    changed = {path for path, content in own.items() if path.read_bytes() != content}
    assert not changed - {saved.run / "lock"}


@pytest.mark.rotating
def test_a_models_folder_is_evaluated_with_agents_and_environments_of_a_spec(
    saved: Saved, shared_runs: Runs, tmp_path: Path
) -> None:
    (tmp_path / "players.py").write_text(textwrap.dedent(PLAYERS))
    data = {"path": str(saved.initial.parent / "eval.jsonl"), "prompt_column": "question", "size": 5}
    spec = yaml.safe_load((saved.initial.parent / "spec.yaml").read_text()) | {
        "runs_dir": str(tmp_path / "runs"),
        "task": {"use": "players:agent"},
        "data": {"train": data | {"size": 1}, "eval": data},
        "evaluation": {"sets": {"environment": {"data": data, "task": {"use": "players:Echo"}}}},
    }
    spec["model"]["path"] = str(saved.initial)
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    ended = shared_runs.succeed(
        "evaluate", saved.exported, "--spec", tmp_path / "spec.yaml", "--samples", "3", "--json"
    )
    document = json.loads(ended.out)
    found = {result["kind"]: result for result in document["evaluations"]}
    assert set(found) == {"offline:sampled", "offline-environment:sampled"}
    for result in found.values():
        assert (result["prompts"], result["samples"], len(result["pass_at"])) == (5, 3, 3)
        assert len(Path(result["file"]).read_text().splitlines()) == 1 + 5 * 3
    environment = found["offline-environment:sampled"]
    assert (environment["accuracy"], environment["metrics"]["turns"]) == (1.0, 2.0)
    assert environment["intervals"]["accuracy"] == pytest.approx(wilson(1.0, 5)), "5 prompts, not 15"

    (folder,) = (tmp_path / "runs/evaluate").iterdir()
    sent = json.loads((folder / "mlflow.json").read_text())
    assert sent["run_id"] in document["mlflow"]
    assert json.loads((folder / "state.json").read_text())["phase"] == "finished"
    assert not list((tmp_path / "runs").glob("*/manifest.json")), "an evaluation is not listed as a run"
