"""Small vision-language models, and token sequences with images for them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl_cli.records.generation import TokenSequence
from asyncrl_cli.records.images import Image, PlacedImage
from asyncrl_cli.train.packing import TrainingRow
from tests.small_models import write_image_model

IMAGE_TOKENS = 4
"""Placeholders of ``picture``, in every model of ``IMAGE_MODELS``."""


def picture(seed: int, width: int = 56, height: int = 56) -> Image:
    """An image of random pixels."""
    from PIL import Image as images

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    written = io.BytesIO()
    images.fromarray(pixels).save(written, "PNG")
    return Image.from_bytes(written.getvalue())


def saved_model(architecture: str, folder: Path) -> None:
    """A model of ``IMAGE_MODELS`` with random weights, whose results depend on the image."""
    import torch
    from transformers import AutoModelForImageTextToText

    write_image_model(architecture, folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.1)
            elif "norm" not in name:
                weight.normal_(0, 0.02)
        if architecture == "gemma3":
            model.model.multi_modal_projector.mm_input_projection_weight.normal_(0, 0.5)
    model.save_pretrained(folder)


def row(config: Any, *parts: int | Image, sampled: int = 4, version: int = 0, seed: int = 0) -> TrainingRow:
    """A training row of random texts of given lengths and images, in turn; the last ``sampled`` tokens count."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    placed = []
    for part in parts:
        if isinstance(part, Image):
            placed.append(PlacedImage(part, len(ids), IMAGE_TOKENS))
            ids += [config.image_token_id] * IMAGE_TOKENS
        else:
            ids += rng.integers(3, 98, part).tolist()
    count = len(ids)
    versions = np.where(np.arange(count) < count - sampled, -1, version).astype(np.int32)
    tokens = TokenSequence(np.array(ids, np.int32), np.zeros(count, np.float32), versions)
    return TrainingRow(tokens, version, True, 0, np.zeros(count, np.int32), tuple(placed))
