"""The reference model at each step, and after a resume. test_adapters_and_references.py tests it with DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_lora import IDS, LORA, MASK, logprobs, make, trained

from asyncrl_cli.train.checkpoints import save_file
from asyncrl_cli.train.model.policy import Policy
from asyncrl_cli.train.model.reference import Copy, Unadapted


def copied(every: int = 0) -> Copy:
    policy = Policy(make(None), 1.0)
    return Copy(policy, policy.model, 0, every)


def answers(reference: Any) -> torch.Tensor:
    found: torch.Tensor = reference(IDS, MASK)
    assert not found.requires_grad
    return found


@pytest.mark.parametrize("adapted", [False, True])
def test_reference_becomes_the_policy_at_each_refresh(adapted: bool, tmp_path: Path) -> None:
    policy = trained(LORA) if adapted else make(None)
    initial = logprobs(make(None))
    if not adapted:
        for parameter in policy.parameters():
            parameter.data.mul_(1.1)
    reference = copied(every=3)
    for step in range(3):
        reference.before_step(step, policy)
        assert torch.equal(answers(reference), initial), step
    reference.before_step(3, policy)
    torch.testing.assert_close(answers(reference), logprobs(policy), rtol=1e-5, atol=1e-5)
    assert (answers(reference) - initial).abs().max() > 1e-3

    (tmp_path / "state").mkdir()
    files, before = reference.state(tmp_path, 0), answers(reference)
    reference.before_step(6, make(None))  # before the files are written
    for path, state in files.items():
        save_file(state, path)
    resumed = copied(every=3)
    resumed.load(tmp_path)
    assert torch.equal(answers(resumed), before)
    refreshed_no_more = copied(every=0)
    refreshed_no_more.load(tmp_path)
    assert torch.equal(answers(refreshed_no_more), initial)


def test_one_that_never_changes_takes_no_file(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    reference = copied()
    reference.before_step(5, trained(LORA))
    assert reference.state(tmp_path, 0) == {}
    reference.load(tmp_path)
    assert torch.equal(answers(reference), logprobs(make(None)))


def test_with_adapters_it_is_the_policy_without_them() -> None:
    policy = Policy(trained(LORA), 1.0)

    class Engine(SimpleNamespace):
        def __call__(self, *arguments: Any) -> Any:
            return policy(*arguments)

    assert torch.equal(answers(Unadapted(Engine(module=policy))), logprobs(make(None)))
    assert (logprobs(policy.model) - logprobs(make(None))).abs().max() > 0.01
