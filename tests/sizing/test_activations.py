"""Activations counted on fake tensors: exact, and two models with few layers give the same as the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl_cli.sizing import activations
from asyncrl_cli.sizing.activations import LiveBytes, TracedMicrobatch, _drop_gradient, _trace, activation_bytes
from asyncrl_cli.sizing.model import sized
from asyncrl_cli.spec.inputs import LoraSpec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.model.chunked_logprobs import chunked_logprobs

pytestmark = pytest.mark.slow

SPEC = ExperimentSpec.model_validate({"model": {"path": "model"}, "task": {"use": "chain_sum"}, "stop": {"steps": 2}})
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 500,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DENSE_FIRST = {"first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def kinds_of(config: Any) -> list[object]:
    with torch.device("meta"):
        return list(sized(SPEC, config, AutoModelForCausalLM.from_config(config)).layers)


def test_storages_count_as_long_as_they_live() -> None:
    given = torch.zeros(1000)
    with LiveBytes([given]) as live:
        view = given.view(10, 100).T  # a part of a tensor that is not counted
        first = torch.zeros(250)
        assert live.live_bytes == live.peak == 1000
        second = first + 1
        del first
        assert (live.live_bytes, live.peak) == (1000, 2000)
        del second
    assert (live.live_bytes, live.peak) == (0, 2000) and view.shape == (100, 10)


@pytest.mark.parametrize(
    ("architecture", "settings", "recompute"),
    [
        ("qwen3", SMALL, False),
        pytest.param("qwen3", SMALL, True, marks=pytest.mark.rotating),
        pytest.param("qwen3_moe", SMALL | EXPERTS, False, marks=pytest.mark.rotating),
        ("qwen3_moe", SMALL | EXPERTS, True),
        ("glm4_moe", SMALL | DENSE_FIRST, False),
        pytest.param("glm4_moe", SMALL | DENSE_FIRST, True, marks=pytest.mark.rotating),
    ],
)
def test_two_short_models_give_the_memory_of_the_whole_model(architecture: str, settings: Any, recompute: bool) -> None:
    config = AutoConfig.for_model(architecture, num_hidden_layers=7, **settings)
    micro_batch = TracedMicrobatch(4, 64, 200, recompute, "float32", "sdpa")
    assert activation_bytes(config, kinds_of(config), micro_batch) == _trace(config, 7, micro_batch)


def test_recomputation_and_shorter_rows_take_less_and_adapters_little_more() -> None:
    config = AutoConfig.for_model("qwen3", num_hidden_layers=6, **SMALL)

    def of(rows: int = 4, recompute: bool = False, lora: LoraSpec | None = None) -> int:
        micro_batch = TracedMicrobatch(rows, 64, rows * 32, recompute, "float32", "sdpa", lora)
        return activation_bytes(config, kinds_of(config), micro_batch)

    assert of(recompute=True) < of(rows=2) < of()
    assert of(rows=2) < of(lora=LoraSpec(rank=8)) < 1.5 * of()


def test_larger_chunks_of_the_head_take_more() -> None:
    config = AutoConfig.for_model("qwen3", num_hidden_layers=1, **SMALL | {"vocab_size": 5000})
    small, large = (
        _trace(config, 1, TracedMicrobatch(4, 64, 200, True, "float32", "sdpa", chunk=positions * 5000))
        for positions in (10, 150)
    )
    assert large - small > 100 * 5000 * 4


@pytest.mark.parametrize(("gpus", "chunk"), [(0, None), (1, 2**27)])
def test_head_uses_the_chunk_size_of_its_device(gpus: int, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[TracedMicrobatch] = []
    monkeypatch.setattr(activations, "activation_bytes", lambda _, __, trained: passes.append(trained) or 0)
    spec = SPEC.model_copy(update={"trainer": SPEC.trainer.model_copy(update={"gpus_per_rank": gpus})})
    config = AutoConfig.for_model("qwen3", num_hidden_layers=1, **SMALL)
    with torch.device("meta"):
        sized(spec, config, AutoModelForCausalLM.from_config(config)).activations(1, 8, 8, False)
    assert [one.chunk for one in passes] == [chunk]


def test_counted_activations_equal_a_real_pass() -> None:
    """Compared with the same operations on real tensors: the policy's own forward and backward pass."""
    from asyncrl_cli.train.model.policy import Policy

    config = AutoConfig.for_model("qwen3", num_hidden_layers=3, **SMALL)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    ids, mask = torch.ones(4, 65, dtype=torch.long), torch.zeros(4, 65, dtype=torch.bool)
    mask[:, 15:] = True
    policy = Policy(model, temperature=1.0)
    with LiveBytes([*model.parameters(), *model.buffers(), ids, mask]) as live:
        policy(ids, mask).sum().backward()
    counted = activation_bytes(config, kinds_of(config), TracedMicrobatch(4, 64, 200, False, "float32", "sdpa"))
    # Fake tensors need the logits, 200 × 500 numbers, once more, because they are not overwritten by log-probs.
    assert live.peak <= counted <= 1.01 * live.peak + 4 * 200 * 500


def test_the_count_of_adapters_is_what_peft_makes() -> None:
    """With frozen experts, on real tensors."""
    from asyncrl_cli.train.model.lora import add_adapters

    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=2, **SMALL, **EXPERTS)
    lora = LoraSpec(rank=4)
    counted = _trace(config, 2, TracedMicrobatch(2, 32, 60, False, "float32", "sdpa", lora))
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    add_adapters(model, lora, seed=0)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_drop_gradient) if parameter.requires_grad else None
    ids = torch.zeros(2, 32, dtype=torch.long)
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[:60]
        head = model.get_output_embeddings()
        chunked_logprobs(head, states, torch.zeros(60, dtype=torch.long), 1.0)[0].sum().backward()
    assert counted == pytest.approx(live.peak, rel=0.1)
