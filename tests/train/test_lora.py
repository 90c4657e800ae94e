"""Adapters: only they are trained, and the trainer's output is the model with merged adapters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl_cli.spec.inputs import LoraSpec
from asyncrl_cli.train.model.lora import LoraError, add_adapters, base_bits, merge, plain_weights
from asyncrl_cli.train.model.policy import Policy
from asyncrl_cli.train.model.reference import unadapted
from asyncrl_cli.train.shards import adapter_layout, adapter_shards, write_shard
from asyncrl_cli.weights.mapped import Copies

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "initializer_range": 0.2,
}
LORA = LoraSpec(rank=3, alpha=7.0)
IDS = torch.arange(2, 22).view(2, 10)
MASK = torch.ones(2, 10, dtype=torch.bool)
MASK[:, :3] = False


def make(
    lora: LoraSpec | None, tied: bool = True, architecture: str = "qwen3", device: str = "cpu", **sizes: int
) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **(SIZES | sizes), tie_word_embeddings=tied)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if lora is not None:
        add_adapters(model, lora, seed=5)
    return model


def trained(lora: LoraSpec, tied: bool = True) -> Any:
    """A model with adapters that differ from their initial values."""
    model = make(lora, tied)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return Policy(model, 1.0)(IDS, MASK)


def test_reference_is_the_policy_without_its_adapters() -> None:
    policy = Policy(trained(LORA), 1.0)

    class Engine(SimpleNamespace):
        def __call__(self, *arguments: Any) -> Any:
            return policy(*arguments)

    assert torch.equal(unadapted(Engine(module=policy), IDS, MASK), logprobs(make(None)))
    assert (logprobs(policy.model) - logprobs(make(None))).abs().max() > 0.01


@pytest.mark.parametrize("tied", [True, False])
def test_adapted_policy_begins_as_the_model_and_trains_only_adapters(tied: bool) -> None:
    model, plain = make(LORA, tied), make(None, tied)
    assert torch.equal(logprobs(model), logprobs(plain))
    Policy(model, 1.0)(IDS, MASK).sum().backward()
    moving = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    linear = [name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)]
    expected = {f"{name}.lora_{part}.default.weight" for name in linear if name != "lm_head" for part in "AB"}
    assert moving == expected


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_merged_weights_are_the_formulas_and_the_adapted_model_stays(tied: bool, targets: Any) -> None:
    lora = LORA.model_copy(update={"target_modules": targets})
    model, plain = trained(lora, tied), make(None, tied)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    state = dict(model.named_parameters())
    merged = {weight.name: weight.merged() for weight in plain_weights(model)}
    assert merged.keys() == dict(plain.named_parameters()).keys()
    adapted = 0
    for name, base in plain.named_parameters():
        expected = base.detach().numpy().astype(np.float64)
        owner = name.removesuffix(".weight")
        if f"{owner}.lora_A.default.weight" in state:
            a, b = (state[f"{owner}.lora_{part}.default.weight"].detach().double().numpy() for part in "AB")
            expected = expected + 7.0 / 3 * (b @ a)
            adapted += 1
        np.testing.assert_allclose(merged[name], expected, rtol=1e-5, atol=1e-6)
    assert adapted == (2 * 7 if targets == "all-linear" else 2 * 2)
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logprobs(plain), logprobs(model), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_state_merges_as_the_model_does(tied: bool) -> None:
    model = trained(LORA, tied)
    found = merge(make(None, tied, device="meta"), LORA, model.state_dict())
    assert found.keys() == make(None, tied).state_dict().keys()
    assert all(torch.equal(found[weight.name], weight.merged()) for weight in plain_weights(model))


def test_the_seed_alone_decides_where_adapters_begin() -> None:
    torch.manual_seed(3)
    first = make(LORA).state_dict()
    drawn = torch.rand(1)
    torch.manual_seed(99)
    second = make(LORA).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(0)
    make(None)
    assert torch.equal(torch.rand(1), drawn), "the process's own random state is unchanged"


@pytest.mark.parametrize(
    ("targets", "tied", "words"),
    [(["no_such"], True, "no_such"), (["embed_tokens"], False, "embeddings"), (["lm_head"], False, "output head")],
)
def test_layers_that_can_have_none(targets: list[str], tied: bool, words: str) -> None:
    with pytest.raises(LoraError, match=words):
        make(LORA.model_copy(update={"target_modules": targets}), tied)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_engines_get_adapters_under_the_names_that_peft_saves(targets: Any) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    saved = get_peft_model_state_dict(get_peft_model(make(None), LoraConfig(r=3, target_modules=targets)))
    model = trained(LORA.model_copy(update={"target_modules": targets}))
    slots = adapter_layout(model, torch.bfloat16)
    (parts,) = zip(*(slot.parts for slot in slots), strict=True)
    assert {part.name: part.shape for part in parts} == {name: tuple(tensor.shape) for name, tensor in saved.items()}
    assert all(
        (part.offset, part.nbytes) == (slot.offset, slot.nbytes) for part, slot in zip(parts, slots, strict=True)
    )
    parameters = {name.replace(".default", ""): parameter for name, parameter in model.named_parameters()}
    joined = {slot.name: torch.full((slot.numel,), torch.nan) for slot in slots}
    for rank in range(3):
        for name, begin, own in adapter_shards(model, rank, 3, zero_stage=0):
            write_shard(joined[name], begin, own, Copies())
    assert all(torch.equal(joined[slot.name].view(slot.shape), parameters[slot.name]) for slot in slots)


EXPERTS = {
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen3_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
    "glm4_moe": {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 8},
}


@pytest.mark.parametrize("architecture", EXPERTS)
def test_only_linear_layers_get_adapters_not_experts_and_routers(architecture: str) -> None:
    model, plain = (make(lora, architecture=architecture, **EXPERTS[architecture]) for lora in (LORA, None))
    head = plain.get_output_embeddings()
    linear = {name for name, layer in plain.named_modules() if isinstance(layer, torch.nn.Linear) and layer is not head}
    parts = {part.name for slot in adapter_layout(model, torch.float32) for part in slot.parts}
    assert parts == {f"base_model.model.{name}.{matrix}.weight" for name in linear for matrix in ("lora_A", "lora_B")}
    assert sum(parameter.requires_grad for parameter in model.parameters()) == len(parts)
    assert not [name for name in linear if "experts." in name and "shared" not in name]
    with pytest.raises(LoraError, match="not supported"):
        make(
            LORA.model_copy(update={"target_modules": ["experts"]}), architecture=architecture, **EXPERTS[architecture]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_the_base_change_with_any_weight_that_is_not_trained(dtype: torch.dtype) -> None:
    model = make(LORA).to(dtype)
    before = base_bits(model)
    with torch.no_grad():
        for parameter in model.parameters():
            bits = parameter.detach().view(torch.int32 if dtype == torch.float32 else torch.int16)
            bits.flatten()[0].bitwise_xor_(1)
            assert (base_bits(model) != before) == (not parameter.requires_grad)
            bits.flatten()[0].bitwise_xor_(1)
    assert base_bits(model) == before
