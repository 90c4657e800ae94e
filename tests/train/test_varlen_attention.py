"""torch's kernel for packed rows gets their boundaries, and its results equal separate rows' results with sdpa."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import varlen_kernel

from asyncrl_cli.checks.model import _possible_attention
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.train.deepspeed_engine import recompute_activations
from asyncrl_cli.train.model.attention import attend_to_rows, why_not_varlen
from asyncrl_cli.train.model.policy import ValueModel, check_policy
from asyncrl_cli.train.packing import pad_rows
from tests.train.test_policy import ARCHITECTURES, LENGTHS, make, rows, scored
from tests.train.test_prefix_trees import LENGTHS as GROUP_LENGTHS
from tests.train.test_prefix_trees import both, group
from tests.train.test_prefix_trees import scored as scored_microbatch
from tests.train.test_repeatable_attention import Operations
from tests.train.test_train_episodes import experiment


@pytest.fixture(autouse=True)
def kernel() -> Iterator[None]:
    with varlen_kernel.installed():
        yield


def assert_equal(results: Any, expected: Any) -> None:
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=1e-6, atol=1e-5 * other.abs().max().item())


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "qwen3_moe"])
def test_packed_rows_are_separate_in_every_layer(architecture: str, recomputes: bool) -> None:
    policy = make(architecture, attention="varlen", packing=True)
    if recomputes:
        recompute_activations(policy.model)
    with Operations() as operations:
        packed = scored(policy, *rows())
    longest = max(prompt + response for prompt, response in LENGTHS) - 1  # the last token predicts nothing
    layers = policy.model.config.num_hidden_layers
    assert [longest] * layers * (1 + recomputes) == varlen_kernel.LONGEST
    assert operations.modes("_varlen_attn") == [True] * layers * (2 + recomputes), "deterministic"
    assert not operations.modes("scaled_dot_product"), "no layer has a mask"
    assert_equal(packed, scored(make(architecture), *rows()))


@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
def test_padded_rows_and_the_check_of_a_model_see_windows(architecture: str) -> None:
    assert_equal(scored(make(architecture, attention="varlen"), *rows()), scored(make(architecture), *rows()))
    policy = make(architecture, attention="varlen", packing=True)
    check_policy(policy, policy)


def test_values_of_packed_rows_are_separate() -> None:
    values = []
    for attention in ("sdpa", "varlen"):
        backbone = make("qwen3", attention=attention).model.base_model
        critic = ValueModel(backbone, packing=attention == "varlen")
        torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
        values.append(critic(*rows()).detach())
    assert_equal(values[1:], values[:1])


def test_an_empty_microbatch_is_a_row_of_one_position() -> None:
    empty = pad_rows([])
    policy = make("qwen3", attention="varlen", packing=True)
    logprobs, entropies, gradient = scored(policy, empty.input_ids, empty.response_mask)
    assert [1] * policy.model.config.num_hidden_layers == varlen_kernel.LONGEST
    assert not logprobs.any() and not entropies.any() and not gradient.any() and gradient.isfinite().all()


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text"])
def test_trees_have_masks_and_are_computed_by_sdpa(architecture: str) -> None:
    policy = make(architecture, attention="varlen", packing=True)
    policy.shares_prefixes = True
    check_policy(policy, policy)
    varlen_kernel.LONGEST.clear()
    shared, separate = both(group(GROUP_LENGTHS))
    results = scored_microbatch(policy, shared)
    assert not varlen_kernel.LONGEST
    assert_equal(results, scored_microbatch(make(architecture), separate))
    assert_equal(scored_microbatch(policy, separate), results)
    assert varlen_kernel.LONGEST


def test_layers_that_are_not_causal_are_computed_by_sdpa() -> None:
    states = torch.randn(1, 2, 5, 8)
    tower = SimpleNamespace(is_causal=False)
    attended, _ = attend_to_rows(tower, states, states, states, None)  # type: ignore[arg-type]
    expected = torch.nn.functional.scaled_dot_product_attention(states, states, states)
    torch.testing.assert_close(attended, expected.transpose(1, 2))
    assert not varlen_kernel.LONGEST


def test_sinks_are_refused_instead_of_left_out() -> None:
    states = torch.randn(1, 2, 5, 8)
    with pytest.raises(ConfigError, match="sinks") as refused:
        attend_to_rows(torch.nn.Identity(), states, states, states, None, s_aux=torch.zeros(2))
    assert refused.value.location == "trainer.attention"


SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
ON_GPUS = {"rollout": {"dtype": "bfloat16"}, "trainer": {"gpus_per_rank": 1, "dtype": "bfloat16"}}
UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "gemma2": ({"attn_logit_softcapping": 50.0}, "caps the scores"),
    "gpt_oss": ({"num_local_experts": 2}, "sinks"),
    "llama4_text": ({"num_local_experts": 2}, "not attention over all earlier positions"),
    "qwen3_next": ({"num_experts": 2}, "not attention over all earlier positions"),
    "deepseek_v3": ({"n_routed_experts": 8, "q_lora_rank": 8}, "another size than its keys"),
    "llama": ({"head_dim": 20}, "has the size 20"),
    "qwen3": ({"head_dim": 512}, "has the size 512"),
}


def small(architecture: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(architecture, **SMALL, vocab_size=50, pad_token_id=0, **changes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("architecture", UNUSABLE)
def test_models_that_the_kernel_cannot_compute_use_sdpa(architecture: str) -> None:
    changes, reason = UNUSABLE[architecture]
    model = small(architecture, **changes)
    spec, why = _possible_attention(experiment(**ON_GPUS), model)
    assert (spec.trainer.attention, spec.trainer.packing) == ("sdpa", False)
    assert why is not None and reason in why
    with pytest.raises(ConfigError, match=reason) as refused:
        _possible_attention(experiment(**ON_GPUS | {"trainer": ON_GPUS["trainer"] | {"attention": "varlen"}}), model)
    assert (refused.value.location, refused.value.hint) == ("trainer.attention", "use sdpa")


def test_other_models_keep_the_default() -> None:
    for architecture in (*ARCHITECTURES, "qwen3_moe"):
        assert why_not_varlen(make(architecture).model, bidirectional=True) is None
    spec = experiment(**ON_GPUS)
    assert _possible_attention(spec, small("qwen3", head_dim=128)) == (spec, None)
