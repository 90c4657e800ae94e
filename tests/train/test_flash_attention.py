"""Flash attention's kernel gets the boundaries of packed rows, and its results equal separate rows' results."""

from __future__ import annotations

from typing import Any

import flash_kernel
import pytest
import torch

from asyncrl_cli.train.deepspeed_engine import recompute_activations
from asyncrl_cli.train.model.policy import Policy, ValueModel
from tests.train.test_policy import ARCHITECTURES, LENGTHS, make, rows, scored


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_kernel.install(monkeypatch.setattr)
    flash_kernel.LONGEST.clear()


def with_flash(policy: Policy) -> Policy:
    policy.model.config._attn_implementation = "flash_attention_2"
    return policy


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "qwen3_moe"])
def test_packed_rows_are_separate_in_every_layer(architecture: str, recomputes: bool) -> None:
    separate = scored(make(architecture), *rows())
    policy = with_flash(make(architecture, packing=True))
    if recomputes:
        recompute_activations(policy.model)
    packed = scored(policy, *rows())
    longest = max(prompt + response for prompt, response in LENGTHS) - 1  # the last token predicts nothing
    layers = policy.model.config.num_hidden_layers
    assert [longest] * layers * (1 + recomputes) == flash_kernel.LONGEST
    for one, other in zip(packed, separate, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=2e-6 * other.abs().max().item())


def test_values_of_packed_rows_are_separate_as_well() -> None:
    values: list[Any] = []
    for packing in (False, True):
        policy = make("qwen3", packing=packing)
        critic = ValueModel((with_flash(policy) if packing else policy).model.base_model, packing)
        torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
        values.append(critic(*rows()).detach())
    assert flash_kernel.LONGEST
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=2e-6 * values[0].abs().max().item())
