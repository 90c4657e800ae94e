"""Operations of passes compared with torch's own counter, and the rates of GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from asyncrl_cli.spec.inputs import LoraSpec
from asyncrl_cli.train.flops import GPU_FLOPS, Amounts, ModelFlops, causal_pairs, peak_flops
from asyncrl_cli.train.model.images import tower_parameters
from asyncrl_cli.train.model.lora import add_adapters
from tests.small_models import ARCHITECTURES, IMAGE_FOLDERS, SMALL

pytestmark = pytest.mark.slow

ROWS, LENGTH = 2, 9
COUNTED = sorted(ARCHITECTURES.keys() - {"gemma3", "qwen3_5_text"})
"""Not the linear attention of Qwen3.5: its recurrence is in no count of ours."""


def model_of(architecture: str, **changes: Any) -> Any:
    """A model with products that torch can count: it does not see into fused attention and grouped products."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(architecture, **(SMALL | ARCHITECTURES[architecture] | changes))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")


def counted(call: Any) -> tuple[int, int]:
    """Operations of a forward pass, and of a forward and a backward pass."""
    with FlopCounterMode(display=False) as forward:
        call()
    with FlopCounterMode(display=False) as both:
        call().sum().backward()
    return forward.get_total_flops(), both.get_total_flops()


def check(model: Any) -> None:
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
    flops, square = ModelFlops.of(model), ROWS * LENGTH * LENGTH  # eager attention computes what the mask hides, too
    amounts = Amounts(tokens=ROWS * LENGTH, predicted=ROWS * LENGTH, pairs=square, window_pairs=square)
    found = counted(lambda: model(input_ids=ids, use_cache=False).logits)
    assert (amounts.times(flops.forward), amounts.times(flops.update)) == found


@pytest.mark.parametrize("architecture", COUNTED)
def test_a_pass_has_the_operations_that_torch_counts(architecture: str) -> None:
    check(model_of(architecture))


def test_tied_heads_count_once_for_each_prediction() -> None:
    check(model_of("qwen3", tie_word_embeddings=True))


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    model = model_of("qwen3")
    full = ModelFlops.of(model).update.tokens
    add_adapters(model, LoraSpec(rank=4), seed=0)
    check(model)
    assert ModelFlops.of(model).update.tokens < 0.8 * full


def test_a_tower_is_not_counted() -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(IMAGE_FOLDERS / "qwen3_vl"))
    flops = ModelFlops.of(model)
    for parameter in tower_parameters(model):
        parameter.requires_grad_(False)
    assert ModelFlops.of(model) == flops


@given(st.integers(0, 40), st.integers(0, 50))
def test_pairs_are_the_keys_that_a_causal_mask_shows(length: int, window: int) -> None:
    shown = [(query, key) for query in range(length) for key in range(query + 1) if not window or query - key < window]
    assert causal_pairs(length, window) == len(shown)


@given(st.lists(st.integers(1, 500), max_size=6), st.integers(0, 64))
def test_sequences_are_counted_one_by_one(lengths: list[int], window: int) -> None:
    flops = ModelFlops(Amounts(), Amounts(), window=window)
    each = [flops.amounts([length], 0) for length in lengths]
    assert flops.amounts(lengths, 0) == Amounts(*(sum(field) for field in zip(*each, strict=True)) if each else ())


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA L40", None),
    ],
)
def test_gpus_are_known_by_the_names_of_their_drivers(name: str, key: str | None) -> None:
    assert peak_flops(name) == GPU_FLOPS.get(key or "")
