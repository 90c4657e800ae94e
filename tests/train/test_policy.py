"""The policy compared with a plain forward pass, and packed rows with padded ones, for several architectures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.train.deepspeed_engine import _restore_rotary_frequencies, recompute_activations
from asyncrl_cli.train.model import chunked_logprobs
from asyncrl_cli.train.model.policy import Policy, check_policy

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": SIZES,
    "llama": SIZES | {"tie_word_embeddings": False},
    "mistral": SIZES | {"sliding_window": 5},
    "gemma3_text": SIZES
    | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi3": SIZES | {"pad_token_id": 0},
    "olmo2": SIZES,
}
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_moe": SIZES | {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32},
    "gemma2": SIZES | {"final_logit_softcapping": 0.5},
    "granite": SIZES | {"logits_scaling": 4.0},
    "opt": {
        "vocab_size": 50,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "init_std": 0.2,
    },
}
LENGTHS = [(3, 9), (1, 4), (7, 2), (1, 1), (5, 12)]
"""Lengths of the prompt and the response of each row."""


def make(
    architecture: str,
    attention: str = "sdpa",
    packing: bool = False,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Policy:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **(ARCHITECTURES | OTHERS)[architecture] | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return Policy(model.eval(), temperature=0.8, packing=packing)


def rows() -> tuple[Tensor, Tensor]:
    """Padded ids and response masks; the masks have gaps."""
    torch.manual_seed(1)
    longest = max(prompt + response for prompt, response in LENGTHS)
    ids = torch.randint(1, 50, (len(LENGTHS), longest))
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (prompt, response) in enumerate(LENGTHS):
        mask[row, prompt : prompt + response] = True
        ids[row, prompt + response :] = 0
    mask[0, 5:7] = False
    return ids, mask


def scored(policy: Policy, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and the gradient of a sum in which every token has its own weight."""
    policy.zero_grad()
    logprobs, entropies = policy(ids, mask, "train")
    weights = torch.arange(mask.numel()).view(mask.shape) / mask.numel()
    ((logprobs + 0.3 * entropies) * weights).sum().backward()
    return (
        logprobs,
        entropies,
        torch.cat([each.grad.flatten() for each in policy.parameters() if each.grad is not None]),
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packing_equals_padding(architecture: str) -> None:
    padded = scored(make(architecture), *rows())
    packed = scored(make(architecture, packing=True), *rows())
    for one, other in zip(packed, padded, strict=True):
        scale = other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=1e-6, atol=2e-6 * scale)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("packing", [False, True])
def test_models_that_can_be_trained_pass_the_check(architecture: str, packing: bool) -> None:
    policy = make(architecture, packing=packing)
    check_policy(policy, policy)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("largest", [1, 30])
def test_check_in_bfloat16_passes_rounding_and_refuses_leaks(
    architecture: str, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: one head computes in float32, the other in bfloat16, and attention rounds differently. The largest
    gap of a token is then above 0.2 nats with large logits."""
    policy = make(architecture, packing=True, dtype=torch.bfloat16, num_hidden_layers=24, tie_word_embeddings=False)
    monkeypatch.setattr(chunked_logprobs, "_logs", _float32_head)
    model, embeddings = policy.model, policy.model.get_input_embeddings().weight.detach()
    with torch.no_grad():
        model.lm_head.weight.mul_(largest / model(torch.arange(3, 19)[None]).logits.abs().max() * policy.temperature)

    def rounded_otherwise(ids: Tensor, mask: Tensor) -> Tensor:
        exact = embeddings.clone()
        torch.manual_seed(1)
        embeddings.mul_(1 + 2**-8 * (torch.rand(embeddings.shape) < 0.05))
        logprobs = policy(ids, mask)
        embeddings.copy_(exact)
        return logprobs

    check_policy(policy, rounded_otherwise)
    backbone = model.base_model
    whole = backbone.forward
    monkeypatch.setattr(backbone, "forward", lambda position_ids=None, **given: whole(**given))  # rows see each other
    with pytest.raises(UserError, match=r"set trainer\.packing to false"):
        check_policy(policy, policy)


def _float32_head(hidden: Tensor, weight: Tensor, bias: None, temperature: float) -> Tensor:
    return torch.log_softmax(hidden.float() @ weight.float().T / temperature, dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("architecture", "packing", "hint"),
    [
        ("gemma2", False, "neither caps nor scales the logits"),
        ("granite", False, "neither caps nor scales the logits"),
        ("opt", True, "set trainer.packing to false"),
    ],
)
def test_models_that_would_be_trained_wrongly_are_refused(
    architecture: str, packing: bool, hint: str, dtype: torch.dtype
) -> None:
    policy = make(architecture, packing=packing, dtype=dtype)
    with pytest.raises(UserError, match=hint):
        check_policy(policy, policy)


def test_an_output_layer_that_is_not_linear_is_refused() -> None:
    model = make("llama").model
    model.set_output_embeddings(torch.nn.Sequential(model.lm_head))
    with pytest.raises(UserError, match="output layer of this llama is not linear"):
        Policy(model, 1.0)


@pytest.mark.parametrize("packing", [False, True])
def test_a_row_is_scored_as_if_it_were_alone(packing: bool) -> None:
    policy = make("qwen3", packing=packing)
    ids, mask = rows()
    with torch.no_grad():
        logprobs, entropies = policy(ids, mask, "measure")
        assert torch.equal(logprobs, policy(ids, mask))
        for row, (prompt, response) in enumerate(LENGTHS):
            end = prompt + response
            logits = policy.model(ids[row : row + 1, : end - 1]).logits[0].double() / 0.8
            logs = logits.log_softmax(-1)
            expected = torch.zeros(2, mask.shape[1], dtype=torch.float64)
            expected[0, 1:end] = logs.gather(-1, ids[row, 1:end, None])[:, 0]
            expected[1, 1:end] = -(logs.exp() * logs).sum(-1)
            found = torch.stack([logprobs[row], entropies[row]]).double()
            torch.testing.assert_close(found, expected * mask[row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_a_microbatch_in_which_nothing_counts_has_a_gradient_of_zeros(packing: bool) -> None:
    policy = make("llama", packing=packing)
    logprobs = policy(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.bool))
    assert logprobs.tolist() == [[0.0, 0.0]]
    logprobs.sum().backward()
    gradients = [parameter.grad for parameter in policy.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_activations_are_computed_again_and_change_nothing() -> None:
    policy, calls = make("qwen3"), 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    policy.model.model.layers[0].mlp.register_forward_pre_hook(count)
    kept = scored(policy, *rows())
    assert calls == 1
    recompute_activations(policy.model)
    again = scored(policy, *rows())
    assert calls == 3, "once forward, once backward"
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text"])
def test_every_rotary_frequency_is_restored(architecture: str) -> None:
    """Gemma 3 has one set of frequencies for each kind of layer, each with its own name."""
    policy, whole = make(architecture), make(architecture)
    exact = {name: buffer for name, buffer in whole.named_buffers() if name.endswith("inv_freq")}
    assert len(exact) == (4 if architecture == "gemma3_text" else 2)
    for name, buffer in policy.named_buffers():
        if name in exact:
            buffer.data = buffer.to(torch.bfloat16)
            assert not torch.equal(buffer.float(), exact[name])
    _restore_rotary_frequencies(policy)
    restored = dict(policy.named_buffers())
    assert all(restored[name].dtype == torch.float32 and torch.equal(restored[name], exact[name]) for name in exact)


def test_rotary_frequencies_that_stay_rounded_are_refused() -> None:
    policy = make("qwen3")
    rotary = policy.model.model.rotary_emb
    rotary.inv_freq.data = rotary.inv_freq.to(torch.bfloat16)
    del rotary.config
    with pytest.raises(UserError, match="has rounded the rotary frequencies"):
        _restore_rotary_frequencies(policy)
