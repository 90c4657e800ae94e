"""A version's memory has the same tensors that `save_pretrained` writes, with the same names and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.train.shards import engine_layout, shards, with_checkpoint_parts, write_shard
from asyncrl_cli.weights.layout import TensorSlot, plan_slots, size_of
from asyncrl_cli.weights.mapped import Copies
from tests.small_models import ARCHITECTURES, IMAGE_MODELS, small_model
from tests.train.pictures import saved_model


def view(memory: torch.Tensor, slot: TensorSlot) -> torch.Tensor:
    return memory[slot.offset : slot.offset + slot.nbytes].view(slot.torch_dtype).view(slot.shape)


@pytest.mark.slow  # it imports the models of eight architectures
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *(f"{name} with images" for name in IMAGE_MODELS)])
def test_the_memory_of_a_version_has_every_tensor_of_the_checkpoint(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    name, _, sees_images = architecture.partition(" ")
    if sees_images:
        saved_model(name, tmp_path / "in")
        model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "in", dtype=torch.float32)
    else:
        model = small_model(name)
    from safetensors.torch import load_file

    model.save_pretrained(tmp_path)
    slots = engine_layout(model, torch.float32)
    memory = torch.zeros(size_of(slots), dtype=torch.uint8)
    own = {slot.name: view(memory, slot) for slot in slots}
    for name, begin, elements in shards(model, rank=0, ranks=1, zero_stage=0):
        write_shard(own[name], begin, elements, Copies())
    parts = {part.name: part for slot in slots for part in slot.parts or (slot,)}
    saved = load_file(tmp_path / "model.safetensors")
    assert parts.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(view(memory, parts[name]), tensor), name


def test_a_tensor_that_is_computed_from_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading

    def transposed(_: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"other": state["weight"].transpose(0, 1).contiguous()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", transposed)
    slots = plan_slots([("weight", torch.float32, (3, 4, 5))])
    model = torch.nn.Module()
    model.config = type("Config", (), {"model_type": "strange"})()  # type: ignore[assignment]
    with pytest.raises(UserError, match="the checkpoint's other is not a part of the model's weight"):
        with_checkpoint_parts(model, slots)
