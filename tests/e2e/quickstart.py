"""The main example of the README, and what a run of it must have learned."""

from __future__ import annotations

from pathlib import Path

from asyncrl_cli.spec.load import load_spec
from tests.e2e.conftest import ROOT, Runs, rows

STEPS = 30
"""Half as many as the spec has. About nine of ten sampled responses are correct by then."""
SHORT = (
    "stop.steps=20",
    "evaluation.every=20",
    "task.options={min_terms: 2, max_terms: 3}",
    "pipeline.groups_per_step=16",
)
"""Changes for a run that takes a third of the time: shorter sums, fewer and smaller steps."""


def train_quickstart(runs: Runs, *changes: str, limit_s: float) -> Path:
    """Train it with these ``--set`` arguments for ``STEPS`` steps; returns the run's folder."""
    # No assertion needs the evaluations between the first step and the last.
    words = (f"runs_dir={runs.folder}", f"stop.steps={STEPS}", f"evaluation.every={STEPS}", *changes)
    spec = ROOT / "specs/quickstart.yaml"
    ended = runs.run("train", spec, *(word for change in words for word in ("--set", change)), limit_s=limit_s)
    assert ended.code == 0, ended.out + ended.err + runs.logs()
    run = runs.newest()
    assert f"finished {rows(run, 'metrics.jsonl')[-1]['step']} steps" in ended.out
    return run


def accuracies(run: Path) -> dict[tuple[str, str], dict[str, float]]:
    """The results of the first evaluations and of the last ones, by kind and time."""
    last = rows(run, "metrics.jsonl")[-1]["step"]
    return {
        (kind, when): rows(run, f"evaluations/step-{step:06d}-{kind}.jsonl")[0]
        for kind in ("greedy", "sampled")
        for when, step in (("before", 0), ("after", last))
    }


def assert_learned(run: Path) -> None:
    """Most sampled responses are correct, and the model explains its steps, which it did not do before."""
    accuracy = accuracies(run)
    assert accuracy["greedy", "before"]["accuracy"] < 0.4
    assert accuracy["greedy", "after"]["accuracy"] >= 0.9
    assert accuracy["sampled", "before"]["accuracy"] < 0.35
    assert accuracy["sampled", "after"]["accuracy"] >= 0.75
    assert accuracy["greedy", "after"]["mean_length"] > 2 * accuracy["greedy", "before"]["mean_length"]


def assert_answers_as_the_engine_did(run: Path) -> None:
    """The final model loads in transformers, and its greedy answers are the last evaluation's."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    last, longest = (
        rows(run, "metrics.jsonl")[-1]["step"],
        load_spec(run / "spec.yaml").spec.rollout.max_response_tokens,
    )
    for sample in rows(run, f"evaluations/step-{last:06d}-greedy.jsonl")[1:17]:
        ids = tokenizer(sample["prompt"], return_tensors="pt").input_ids
        answer = model.generate(ids, max_new_tokens=longest, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(answer, skip_special_tokens=True) == sample["response"]
