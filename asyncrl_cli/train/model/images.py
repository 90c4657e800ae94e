"""Images in the trainer: their pixels, their places, and the pass of a model that sees them (decision 0104).

A model scatters an image's features over its placeholder tokens. A token that the policy sampled may have the same id,
and is text, for the engine, too. So the places of images count here, never ids.

Invariant: every pass runs the vision tower, with a stand-in where a micro-batch has none. Under ZeRO-3 the tower's
weights are gathered by all ranks together, and gradients are added up over all of them.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.records.images import Image, ImageCache, PlacedImage
from asyncrl_cli.spec.inputs import ModelSpec
from asyncrl_cli.spec.sections import is_flash
from asyncrl_cli.train.model.sequence_parallel import row_lengths
from asyncrl_cli.train.prefix_trees import TreeLayout

CACHED_BYTES = 2**28
"""Pixels of images that are kept: the rows of a group have the same ones, and so do the epochs of a step."""
STAND_IN = (56, 56)
"""Width and height of the image that stands for none, in pixels; processors enlarge it where they need more."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageInputs:
    """The images of a micro-batch, as a model takes them."""

    placeholders: Tensor
    """bool, [rows, tokens]: where features of images are. All false: ``pixels`` are of one image without a place."""
    pixels: dict[str, Tensor]
    """Arguments of the model's ``get_image_features``: of all images, row by row."""
    positions: Tensor | None
    """int64, [3, rows, tokens]: time, height and width (M-RoPE, arXiv 2409.12191, section 2.1). None: the model has
    only positions of tokens."""
    bidirectional: bool
    """Placeholders of an image see each other, also later ones (Gemma 3)."""

    def to(self, device: torch.device | str) -> ImageInputs:
        """The same on another device."""
        return ImageInputs(
            self.placeholders.to(device),
            pixels={name: tensor.to(device) for name, tensor in self.pixels.items()},
            positions=None if self.positions is None else self.positions.to(device),
            bidirectional=self.bidirectional,
        )

    def whole(self) -> dict[str, Any]:
        """The arguments of a transformers model with its head, which scatters the features by ids."""
        types = {} if self.positions is None else {"mm_token_type_ids": self.placeholders.int()}
        if self.bidirectional:
            types["token_type_ids"] = self.placeholders.long()
        return {**self.pixels, **types}

    def before_last(self, packed: Tensor | None) -> ImageInputs:
        """The inputs without each row's last token; with ``packed``, bool [rows, tokens - 1], only of these tokens,
        joined in one row."""
        placeholders, positions = self.placeholders[:, :-1], self.positions
        if positions is not None:
            positions = positions[..., :-1]
        if packed is not None:
            placeholders = placeholders[packed][None]
            positions = None if positions is None else positions[:, packed][:, None]
        return ImageInputs(placeholders, self.pixels, positions, self.bidirectional)

    def by_tree(self, trees: TreeLayout) -> ImageInputs:
        """The inputs of rows, by the positions of their trees; ``pixels`` are without images of shared positions."""
        positions = None if self.positions is None else torch.stack([trees.of_tokens(axis) for axis in self.positions])
        return ImageInputs(trees.of_tokens(self.placeholders), self.pixels, positions, self.bidirectional)


class Vision:
    """Makes a model's inputs of images."""

    def __init__(self, model: Any, folder: str, bidirectional: bool) -> None:
        """``model``: a transformers model with a vision tower; ``folder`` has its processor.

        ``bidirectional``: engines let the placeholders of an image see each other, in a model that was made for it.
        vLLM does so on GPUs alone. Raises ``UserError`` for a model that does not work as described above.
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
        self.bidirectional = bidirectional and "token_type_ids" in forward
        if self.bidirectional and is_flash(attention := backbone.config.get_text_config()._attn_implementation):
            raise UserError(
                f"the tokens of an image see each other in a {model.config.model_type}, and {attention} is causal",
                location="trainer.attention",
                hint="use sdpa",
            )
        self._processor = image_processor(folder)
        self._pixels = ImageCache(self._processed, nbytes=_nbytes, limit=CACHED_BYTES).of
        self._placed: PlacedImage | None = None

    def inputs(
        self, rows: Sequence[Sequence[PlacedImage]], tokens: int, shared: Sequence[int] | None = None
    ) -> ImageInputs:
        """The inputs, on the CPU, for ``rows`` of as many ``tokens``; no row stands for one without an image.

        Images in the first ``shared`` tokens of a row are not among the pixels: an earlier row has them.
        """
        placeholders = torch.zeros(max(1, len(rows)), tokens, dtype=torch.bool)
        for index, placed in enumerate(rows):
            for one in placed:
                placeholders[index, one.offset : one.offset + one.length] = True
        found = [self._pixels(one.image) for placed in rows for one in placed]
        positions = None
        if self._rope_index is not None:
            positions, _ = self._rope_index(
                torch.zeros_like(placeholders, dtype=torch.int64),
                mm_token_type_ids=placeholders.int(),
                image_grid_thw=torch.cat([part["image_grid_thw"] for part in found]) if found else None,
            )
        firsts = [0] * len(rows) if shared is None else shared
        own = [
            self._pixels(one.image)
            for first, placed in zip(firsts, rows, strict=True)
            for one in placed
            if one.offset >= first
        ]
        parts = own or [self._pixels(_stand_in())]
        pixels = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return ImageInputs(placeholders, pixels, positions, self.bidirectional)

    def stand_in(self, model: Any) -> PlacedImage:
        """The image of ``with_image``. The first call runs the vision tower."""
        if self._placed is None:
            image = _stand_in()
            with torch.no_grad():
                pixels = {name: tensor.to(model.device) for name, tensor in self._pixels(image).items()}
                found = model.base_model.get_image_features(**pixels, return_dict=True)
            self._placed = PlacedImage(image, 1, sum(len(part) for part in found.pooler_output))
        return self._placed

    def with_image(
        self, model: Any, ids: Tensor, mask: Tensor, shared: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor, ImageInputs]:
        """``ids`` and ``mask``, [rows, tokens], with an image of the model before each row's second token. ``shared``:
        as in ``inputs``."""
        placed = self.stand_in(model)
        placeholders = torch.full((len(ids), placed.length), model.config.image_token_id, device=ids.device)
        inputs = self.inputs([(placed,)] * len(ids), ids.shape[1] + placed.length, shared)
        return (
            torch.cat([ids[:, :1], placeholders, ids[:, 1:]], dim=1),
            torch.cat([mask[:, :1], torch.zeros_like(placeholders, dtype=torch.bool), mask[:, 1:]], dim=1),
            inputs.to(ids.device),
        )

    def _processed(self, image: Image) -> dict[str, Tensor]:
        made = self._processor(images=[image.decoded()], return_tensors="pt")
        return {name: made[name] for name in made if name in self._accepted}


def _stand_in() -> Image:
    from PIL import Image as images

    written = io.BytesIO()
    images.radial_gradient("L").resize(STAND_IN).convert("RGB").save(written, "PNG")
    return Image.of(written.getvalue())


def image_processor(folder: str) -> Any:
    """The image processor of a model's folder, or hub id. Raises ``UserError``."""
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(folder).image_processor
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise UserError(
            f"no image processor can be loaded from {folder}: {' '.join(str(error).split())[:300]}",
            hint="use a model with processor files, and install torchvision as requirements/README.md describes",
        ) from error


def states(backbone: Any, ids: Tensor, positions: Tensor | None, images: ImageInputs, **given: Any) -> Tensor:
    """The last hidden states, [rows, positions, width], of a transformers model without its head.

    ``ids``: int64, [rows, positions], with the true id of every token; ``positions``: of tokens in packed rows, as
    ``ids``; None: 0, 1, 2, ... Features of images replace the embeddings of placeholders. ``given``: further arguments
    of the model.
    """
    found = backbone.get_image_features(**images.pixels, return_dict=True)
    placeholders, shown = images.placeholders, bool(images.placeholders.any())
    token = backbone.config.image_token_id
    text = ids.where(ids != token, 0)  # a sampled placeholder is text, and embedded by its true id below
    arguments = given | ({"mm_encoder_outputs": {"image": found}} if shown else {})
    if images.positions is not None:
        rope = images.positions
        arguments["position_ids"] = rope if positions is None else torch.cat([positions[None], rope])
    elif positions is not None:
        arguments["position_ids"] = positions
    if positions is not None:
        arguments |= row_lengths(backbone, positions)
    if images.bidirectional and shown:
        arguments["token_type_ids"] = placeholders.long()
    shown_ids = torch.where(placeholders, token, text)
    # Threads that share a model (warm_start.py) must not meet each other's hooks, so there is none without need.
    special = not shown or not torch.equal(shown_ids, ids)
    with _embedding(backbone.get_input_embeddings(), ids, None if shown else found) if special else nullcontext():
        hidden: Tensor = backbone(input_ids=shown_ids, use_cache=False, **arguments).last_hidden_state
    return hidden


@contextmanager
def _embedding(embeddings: nn.Module, ids: Tensor, unplaced: Any | None) -> Iterator[None]:
    """Have ``embeddings`` embed ``ids``, whatever they are given. Features without a place take part, times 0."""

    def add(module: nn.Module, given: Any, embedded: Tensor) -> Tensor:
        assert unplaced is not None
        layers = [unplaced.pooler_output, *(getattr(unplaced, "deepstack_features", None) or ())]
        total = torch.stack([part.sum() for layer in layers for part in layer]).sum()
        return embedded + total.to(embedded.dtype) * 0

    handles = [embeddings.register_forward_pre_hook(lambda module, given: (ids,))]
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
"""Parts of projectors' names; Qwen's is inside its tower."""


def tower_parameters(model: Any) -> list[nn.Parameter]:
    """The weights of a model's vision tower without its projector. Raises ``UserError`` if it has no tower."""
    backbone = model.base_model
    towers = [tower for name in TOWERS if (tower := getattr(backbone, name, None)) is not None]
    found = [
        parameter
        for tower in towers
        for name, parameter in tower.named_parameters()
        if not any(part in name for part in PROJECTORS)
    ]
    if not found:
        raise UserError(
            f"this {model.config.model_type} has no vision tower that can be frozen", hint="set model.freeze to []"
        )
    return found


def freeze(model: Any, spec: ModelSpec) -> None:
    """Have the parts in `model.freeze` not trained. Raises ``UserError`` if the model has no such part."""
    if spec.max_images and "vision" in spec.freeze:
        for parameter in tower_parameters(model):
            parameter.requires_grad_(False)


def _nbytes(pixels: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in pixels.values())
