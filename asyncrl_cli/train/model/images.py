"""Images in the trainer: their pixels, their places, and the pass of a model that sees them (decision 0102).

A model scatters an image's features over its placeholder tokens. The policy may sample a token with the same id, which
is text, also for the engine. So this module goes by the places of images, never by ids.

Invariant: every pass runs the vision tower, with a stand-in image if a micro-batch has no image. Under ZeRO-3 all ranks
gather the tower's weights together, and add up their gradients.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.records.images import Image, ImageCache, PlacedImage
from asyncrl_cli.spec.inputs import ModelSpec
from asyncrl_cli.spec.sections import needs_no_mask
from asyncrl_cli.train.model.attention import sees_images_both_ways
from asyncrl_cli.train.model.pass_layout import moved

CACHED_BYTES = 2**28
"""Limit of the cache of pixels: a group's rows have the same images, and so do a step's epochs."""
STAND_IN = (56, 56)
"""Width and height of the stand-in image, in pixels; processors enlarge it if they need more."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageInputs:
    """A micro-batch's images, as a model takes them."""

    placeholders: Tensor
    """bool, [rows, tokens]: true for an image's placeholders. All false: ``pixels`` belong to the stand-in image."""
    pixels: dict[str, Tensor]
    """Arguments of the model's ``get_image_features`` for all images, row by row."""
    positions: Tensor | None
    """int64, [3, rows, tokens]: time, height and width (M-RoPE, arXiv 2409.12191, section 2.1). None: the model has
    only positions of tokens."""
    bidirectional: bool
    """An image's placeholders see each other, including later ones (Gemma 3)."""
    has_images: bool
    """Some placeholder is true."""

    def arguments_with_head(self) -> dict[str, Any]:
        """Return the arguments for a transformers model with its head, which scatters the features by ids."""
        types = {} if self.positions is None else {"mm_token_type_ids": self.placeholders.int()}
        if self.bidirectional:
            types["token_type_ids"] = self.placeholders.long()
        return {**self.pixels, **types}

    def arranged(self, pick: Callable[[Tensor], Tensor]) -> ImageInputs:
        """Arrange the inputs by other positions than [rows, tokens], with ``pick`` for each matrix. ``pixels`` must
        already lack images without a position."""
        positions = None if self.positions is None else torch.stack([pick(axis) for axis in self.positions])
        return replace(self, placeholders=pick(self.placeholders), positions=positions)


class Vision:
    """Makes a model's inputs from images."""

    def __init__(self, model: Any, folder: str, bidirectional: bool) -> None:
        """``model``: a transformers model with a vision tower; ``folder`` has its processor.

        ``bidirectional``: engines let an image's placeholders see each other, if the model was made for it. vLLM does
        so only on GPUs. Raises ``UserError`` for a model that does not scatter features over placeholders.
        """
        backbone = model.base_model
        forward = inspect.signature(backbone.forward).parameters
        if not hasattr(backbone, "get_image_features") or "mm_encoder_outputs" not in forward:
            raise UserError(
                f"images for a {model.config.model_type} are not supported",
                hint="use a Qwen2.5-VL, Qwen3-VL or Gemma 3, or set model.max_images to 0",
            )
        self._rope_index = getattr(backbone, "get_rope_index", None)
        self._accepted = inspect.signature(backbone.get_image_features).parameters.keys()
        self.bidirectional = bidirectional and sees_images_both_ways(backbone)
        if self.bidirectional and needs_no_mask(attention := backbone.config.get_text_config()._attn_implementation):
            raise UserError(
                f"the tokens of an image see each other in a {model.config.model_type}, and {attention} is causal",
                location="trainer.attention",
                hint="use sdpa",
            )
        self._processor = image_processor(folder)
        self._pixels = ImageCache(
            self._processed, nbytes=lambda pixels: sum(each.nbytes for each in pixels.values()), limit=CACHED_BYTES
        ).get
        self._placed_image: PlacedImage | None = None

    def inputs(
        self, rows: Sequence[Sequence[PlacedImage]], tokens: int, shared: Sequence[int] | None = None
    ) -> ImageInputs:
        """Make the inputs, on the CPU, for ``rows`` of ``tokens`` tokens; no rows: one row without an image.

        ``pixels`` omits images in the first ``shared`` tokens of a row: an earlier row has them.
        """
        placeholders = torch.zeros(max(1, len(rows)), tokens, dtype=torch.bool)
        for index, row_images in enumerate(rows):
            for placed_image in row_images:
                placeholders[index, placed_image.offset : placed_image.offset + placed_image.length] = True
        positions = None
        if self._rope_index is not None:
            grids = [self._pixels(placed_image.image)["image_grid_thw"] for row in rows for placed_image in row]
            positions, _ = self._rope_index(
                torch.zeros_like(placeholders, dtype=torch.int64),
                mm_token_type_ids=placeholders.int(),
                image_grid_thw=torch.cat(grids) if grids else None,
            )
        new_images = [
            placed_image.image
            for shared_tokens, row_images in zip(shared or [0] * len(rows), rows, strict=True)
            for placed_image in row_images
            if placed_image.offset >= shared_tokens
        ]
        all_pixels = [self._pixels(image) for image in new_images or [_stand_in()]]
        pixels = {name: torch.cat([image_pixels[name] for image_pixels in all_pixels]) for name in all_pixels[0]}
        return ImageInputs(placeholders, pixels, positions, self.bidirectional, bool(placeholders.any()))

    def stand_in(self, model: Any) -> PlacedImage:
        """Return the image of ``with_image``. The first call runs the vision tower."""
        if self._placed_image is None:
            image = _stand_in()
            with torch.no_grad():
                pixels = {name: tensor.to(model.device) for name, tensor in self._pixels(image).items()}
                features = model.base_model.get_image_features(**pixels, return_dict=True)
            self._placed_image = PlacedImage(image, 1, sum(map(len, features.pooler_output)))
        return self._placed_image

    def with_image(
        self, model: Any, ids: Tensor, mask: Tensor, shared: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor, ImageInputs]:
        """Insert the stand-in image before the second token of each row of ``ids`` and ``mask``, [rows, tokens].
        ``shared``: as in ``inputs``."""
        placed_image = self.stand_in(model)
        placeholders = torch.full((len(ids), placed_image.length), model.config.image_token_id, device=ids.device)
        inputs = self.inputs([(placed_image,)] * len(ids), ids.shape[1] + placed_image.length, shared)
        return (
            torch.cat([ids[:, :1], placeholders, ids[:, 1:]], dim=1),
            torch.cat([mask[:, :1], torch.zeros_like(placeholders, dtype=torch.bool), mask[:, 1:]], dim=1),
            moved(inputs, ids.device),
        )

    def _processed(self, image: Image) -> dict[str, Tensor]:
        outputs = self._processor(images=[image.decoded()], return_tensors="pt")
        return {name: outputs[name] for name in outputs if name in self._accepted}


def _stand_in() -> Image:
    from PIL import Image as images

    png = io.BytesIO()
    images.radial_gradient("L").resize(STAND_IN).convert("RGB").save(png, "PNG")
    return Image.from_bytes(png.getvalue())


def image_processor(folder: str) -> Any:
    """Load the image processor of a model's folder or hub id. Raises ``UserError``."""
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(folder).image_processor
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise UserError(
            f"no image processor can be loaded from {folder}: {' '.join(str(error).split())[:300]}",
            hint="use a model with processor files, and install torchvision as requirements/README.md describes",
        ) from error


def states(backbone: Any, ids: Tensor, positions: Tensor | None, images: ImageInputs, **extra_arguments: Any) -> Tensor:
    """Compute the last hidden states, [rows, positions, width], of a transformers model without its head.

    ``ids``: int64, [rows, positions], every token's true id. ``positions``: token positions in packed rows, like
    ``ids``; None: 0, 1, 2, ... Image features replace the embeddings of placeholders. ``extra_arguments``: further
    arguments of the model.
    """
    features = backbone.get_image_features(**images.pixels, return_dict=True)
    placeholders, has_images = images.placeholders, images.has_images
    token = backbone.config.image_token_id
    text = ids.where(ids != token, 0)  # a sampled placeholder is text, and is embedded by its true id below
    arguments = extra_arguments | ({"mm_encoder_outputs": {"image": features}} if has_images else {})
    if images.positions is not None:
        rope = images.positions
        arguments["position_ids"] = rope if positions is None else torch.cat([positions[None], rope])
    elif positions is not None:
        arguments["position_ids"] = positions
    if images.bidirectional and has_images:
        arguments["token_type_ids"] = placeholders.long()
    input_ids = torch.where(placeholders, token, text)
    with _embedding(backbone.get_input_embeddings(), ids, None if has_images else features):
        hidden: Tensor = backbone(input_ids=input_ids, use_cache=False, **arguments).last_hidden_state
    return hidden


@contextmanager
def _embedding(embeddings: nn.Module, ids: Tensor, unplaced: Any | None) -> Iterator[None]:
    """Make ``embeddings`` embed ``ids``, whatever input they get. Features without a place are added times 0: the
    tower's backward pass is collective."""

    def add(module: nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
        assert unplaced is not None
        layers = [unplaced.pooler_output, *(getattr(unplaced, "deepstack_features", None) or ())]
        total = torch.stack([image_features.sum() for layer in layers for image_features in layer]).sum()
        return embedded + total.to(embedded.dtype) * 0

    handles = [embeddings.register_forward_pre_hook(lambda module, inputs: (ids,))]
    if unplaced is not None:
        handles.append(embeddings.register_forward_hook(add))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


TOWERS = ("visual", "vision_tower", "vision_model")
"""Names of vision towers in transformers' models."""
PROJECTORS = ("merger", "projector", "connector")
"""Parts of projectors' names. Qwen's projector is inside its tower."""


def tower_parameters(model: Any) -> list[nn.Parameter]:
    """Return the weights of a model's vision tower without its projector. Raises ``UserError`` if it has no tower."""
    backbone = model.base_model
    towers = [tower for name in TOWERS if (tower := getattr(backbone, name, None)) is not None]
    parameters = [
        parameter
        for tower in towers
        for name, parameter in tower.named_parameters()
        if not any(projector in name for projector in PROJECTORS)
    ]
    if not parameters:
        raise UserError(
            f"this {model.config.model_type} has no vision tower that can be frozen", hint="set model.freeze to []"
        )
    return parameters


def freeze(model: Any, spec: ModelSpec) -> None:
    """Exclude the parts in `model.freeze` from training. Raises ``UserError`` if the model has no such part."""
    if spec.max_images and "vision" in spec.freeze:
        for parameter in tower_parameters(model):
            parameter.requires_grad_(False)
