"""Images as vLLM's inputs, made by its processor for the model.

asyncrl tokenizes prompts itself, with all placeholders (decision 0102), so vLLM must not expand them. Its processor
runs on a prompt with one placeholder, only for the pixels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from asyncrl_cli.records.images import Image, ImageCache, PlacedImage

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

KEPT_BYTES = 2**30
"""Limit of the cache of processed images. A 1-megapixel image has about 12 MB."""


class VllmImages:
    """Makes vLLM's inputs for sequences with images. Processed images are kept by digest."""

    def __init__(self, vllm: AsyncLLM) -> None:
        self._vllm = vllm
        self._cache = ImageCache(self._process, nbytes=lambda processed: _nbytes(processed[0]), limit=KEPT_BYTES)
        # One thread, as in vLLM: its processors are not thread-safe.
        self._thread = ThreadPoolExecutor(1, "images")

    async def processed(self, images: Sequence[PlacedImage]) -> list[Any]:
        """Return vLLM's input for each image, which does not depend on the weight version.

        Raises ``RuntimeError`` if vLLM's processor gives an image another number of tokens than the model's.
        """
        if not images:
            return []
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: list(map(self._pixels, images)))

    def prompt(self, ids: Sequence[int], images: Sequence[PlacedImage], processed: Sequence[Any], version: int) -> Any:
        """Return vLLM's input for a sequence that starts under weight ``version``."""
        from vllm.inputs import mm_input
        from vllm.multimodal.inputs import PlaceholderRange

        return mm_input(
            list(ids),
            mm_kwargs={"image": list(processed)},
            # vLLM caches the vision tower's outputs by this hash, and they depend on the weights.
            mm_hashes={"image": [f"{placed_image.image.digest}-{version}" for placed_image in images]},
            mm_placeholders={
                "image": [PlaceholderRange(placed_image.offset, placed_image.length) for placed_image in images]
            },
            cache_salt=str(version),
        )

    def _pixels(self, placed_image: PlacedImage) -> Any:
        pixels, tokens = self._cache.get(placed_image.image)
        if tokens != placed_image.length:
            raise RuntimeError(
                f"vLLM's processor gives image {placed_image.image.digest} {tokens} tokens, "
                f"and the model's own processor {placed_image.length}"
            )
        return pixels

    def _process(self, image: Image) -> tuple[Any, int]:
        """Return vLLM's input, and its number of placeholder tokens."""
        from vllm.multimodal.processing.context import TimingContext
        from vllm.multimodal.processing.inputs import ProcessorInputs

        processor = self._vllm.renderer.mm_processor
        assert processor is not None  # model.max_images is not 0
        text = processor.dummy_inputs.get_dummy_text({"image": 1})
        output = processor.apply(
            ProcessorInputs(
                prompt=self._vllm.get_tokenizer().encode(text, add_special_tokens=False),
                mm_data_items=processor.info.parse_mm_data({"image": [image.decoded()]}),
            ),
            TimingContext(enabled=False),
        )
        (pixels,) = output["mm_kwargs"]["image"]
        (place,) = output["mm_placeholders"]["image"]
        return pixels, place.get_num_embeds()


def _nbytes(pixels: Any) -> int:
    return sum(getattr(field.data, "nbytes", 0) for field in pixels.values())
