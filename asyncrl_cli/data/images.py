"""Images of rows: finding, reading and checking them, and the tokens that a model sees in their place."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.files import LFS_HINT, POINTER, read_regular
from asyncrl_cli.data.special_tokens import ignoring_marks
from asyncrl_cli.records.images import Image, PixelError, PlacedImage
from asyncrl_cli.records.prompt import ChatError, Message, Prompt

MARK = "<image>"
"""The place of an image in a text, for rows with a column of images."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 2**26
"""Larger images are refused before decoding: a file of a few kilobytes may decode to gigabytes."""

MAX_BYTES = 2**28
"""Larger files of images are refused before they are read."""

_SOURCE_KEYS = ("image", "image_url", "url", "path")
"""Keys that may name an image in a message part, or in a mapping of an image column."""


class ImageError(ValueError):
    """An unusable image, or an unusable place for one; ``str`` gives the reason."""


def with_column(content: str | tuple[Message, ...], value: Any) -> tuple[Message, ...]:
    """Insert the images of a row's column into the content, as parts of its messages.

    They replace parts ``{"type": "image"}`` without an image, or else the marks ``<image>``. Without either, they come
    first in the first user message. Raises ``ImageError`` unless the numbers of places and images are equal.
    """
    images = list(value) if isinstance(value, list | tuple) else [value]
    messages: list[Message] = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
    message_items = [list(_content_items(message)) for message in messages]
    if not any(map(is_blank, chain.from_iterable(message_items))):
        message_items = [list(chain.from_iterable(map(_split, items))) for items in message_items]
    place_count = sum(map(is_blank, chain.from_iterable(message_items)))
    if not place_count and any(map(is_image, chain.from_iterable(message_items))):
        raise ImageError("images in its messages and in a column: put all images into one of them")
    if not place_count:
        user_index = next((index for index, message in enumerate(messages) if message.get("role") == "user"), 0)
        message_items[user_index] = [{"type": "image"}] * len(images) + message_items[user_index]
    elif place_count != len(images):
        raise ImageError(f"{len(images)} images, and {place_count} places for them ({MARK}, or parts of type image)")
    unplaced = iter(images)
    filled = [
        [{"type": "image", "image": next(unplaced)} if is_blank(item) else item for item in items]
        for items in message_items
    ]
    return tuple(
        {**message, "content": items} if any(map(is_image, items)) else message
        for message, items in zip(messages, filled, strict=True)
    )


def image_sources(content: str | Sequence[Message]) -> list[Any]:
    """Return the paths, URLs, bytes and mappings that name the messages' images."""
    messages = () if isinstance(content, str) else content
    return [_image_source(item) for message in messages for item in _content_items(message) if is_image(item)]


def with_read_images(prompt: Prompt, folder: Path) -> Prompt:
    """Read and check a prompt's images, and put their digests into its messages. Relative paths start from ``folder``.
    Raises ``ImageError``."""
    if isinstance(prompt.content, str) or not image_sources(prompt.content):
        return prompt
    content, images = _with_digests(prompt.content, partial(_read_image, folder=folder))
    return replace(prompt, content=tuple(content), images=tuple(images))


def embedded(
    messages: Sequence[Message], max_pixels: int, check_count: Callable[[int], None]
) -> tuple[list[Message], dict[str, Image]]:
    """Replace the images in messages, given as data URLs, by digests; returns messages, and images by digest.

    Raises ``ImageError`` also for an image with more pixels, and for files and other URLs, which are not read; and the
    errors of ``check_count``, which gets the number of images before one is decoded.
    """
    urls = [item["image"] for message in messages for item in _content_items(message) if is_image(item)]
    for image_number, url in enumerate(urls, start=1):
        if not url.startswith("data:"):
            raise ImageError(
                f"image {image_number} is not a data URL ({url:.80}), and nothing is downloaded: send it in base64"
            )
    check_count(len(urls))
    embedded_messages, images = _with_digests(
        messages, lambda url, image_number: _from_data_url(url, f"image {image_number}", max_pixels)
    )
    return embedded_messages, {image.digest: image for image in images}


def _with_digests(messages: Sequence[Message], read: Callable[[Any, int], Image]) -> tuple[list[Message], list[Image]]:
    """Replace the images in messages by digests. ``read`` gets an image's source and number, from 1."""
    images: list[Image] = []

    def canonical(item: Any) -> Any:
        if not is_image(item):
            return item
        images.append(read(_image_source(item), len(images) + 1))
        return {"type": "image", "image": images[-1].digest}

    return [
        {**message, "content": [canonical(item) for item in _content_items(message)]}
        if any(map(is_image, _content_items(message)))
        else message
        for message in messages
    ], images


def checked_image(data: bytes, name: str = "the image", max_pixels: int = MAX_PIXELS) -> Image:
    """Return the image with these encoded bytes, if it can be decoded. Raises ``ImageError``, which uses ``name``."""
    from PIL import Image as Pillow
    from PIL import UnidentifiedImageError

    try:
        with Pillow.open(io.BytesIO(data), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > max_pixels:
                raise ImageError(f"{name} has {width} x {height} pixels, more than {max_pixels:,}")
            # A camera's JPEG may have a preview as its second frame. Counting the frames would read all of them.
            with suppress(EOFError):
                if opened.format != "MPO":
                    opened.seek(1)
                    raise ImageError(f"{name} is animated: it has more than one frame")
        image = Image.from_bytes(data)
        image.decoded()
    except ImageError:
        raise
    except PixelError as error:
        raise ImageError(f"{name} has {error}") from None
    except UnidentifiedImageError:
        raise ImageError(f"{name} is not an image of a known format ({', '.join(FORMATS)})") from None
    except Exception as error:  # Pillow's readers raise anything for broken files
        raise ImageError(f"{name} is broken: {error}") from error
    return image


class ImageTokens:
    """Makes token ids of texts with images, with the processor in a model's folder (``AutoProcessor``). Engines and
    trainer get only these ids."""

    def __init__(self, folder: str, max_images: int, max_pixels: int) -> None:
        """Limits: images in a conversation, and pixels of each."""
        self._folder = folder
        self.max_images = max_images
        self.max_pixels = max_pixels

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoProcessor

        try:
            processor = AutoProcessor.from_pretrained(self._folder, trust_remote_code=False)
            if not hasattr(processor, "image_processor"):  # without a processor it returns a tokenizer
                raise ValueError("the model has none")
            processor.tokenizer = ignoring_marks(processor.tokenizer)
        except Exception as error:  # transformers raises anything for wrong files
            reason = " ".join(str(error).split())
            fault = f"no processor for images can be loaded from {self._folder}: {reason}"
            hint = "use a vision-language model, and install torchvision (docs/models.md)"
            raise ConfigError(fault, location="model.max_images", hint=hint) from error
        return processor

    def check_count(self, images: int) -> None:
        """Raise ``ChatError`` for more images than a conversation may have."""
        if images and not self.max_images:
            hint = "set it to the number of images that a conversation may have, or remove the images"
            raise ChatError(f"images ({images}), and model.max_images is 0: {hint}")
        if images > self.max_images:
            raise ChatError(f"{images} images, more than model.max_images ({self.max_images})")

    def encode(self, text: str, images: Sequence[Image]) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Tokenize a text, with each image's placeholders in place of the chat template's mark; returns ids and places.

        Raises ``ChatError`` unless the text shows each image once, and ``ConfigError`` without a processor.
        """
        self.check_count(len(images))
        pixels = [image.decoded() for image in images]
        for image_number, (width, height) in enumerate((image.size for image in pixels), start=1):
            if width * height > self.max_pixels:
                size = f"{width} x {height} = {width * height:,} pixels"
                raise ChatError(
                    f"image {image_number} has {size}, more than data.image_max_pixels ({self.max_pixels:,})"
                )
        try:
            inputs = self._processor(text=[text], images=[pixels], add_special_tokens=False)
        except (ValueError, IndexError, StopIteration) as error:
            raise ChatError(f"the model's processor refuses its {len(images)} images: {error}") from error
        ids: list[int] = list(inputs["input_ids"][0])
        placeholder, offset, places = self._processor.image_token_ids[0], 0, []  # Gemma 3's image_token_id differs
        for token, run in groupby(ids):
            length = len(list(run))
            if token == placeholder:
                places.append((offset, length))
            offset += length
        if len(places) != len(images):
            raise ChatError(f"{len(images)} images, and the chat template's text shows {len(places)}")
        return ids, tuple(PlacedImage(image, *place) for image, place in zip(images, places, strict=True))


def _content_items(message: Any) -> Iterator[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        yield {"type": "text", "text": content}
    elif isinstance(content, list | tuple):
        yield from content


def _split(item: Any) -> Iterator[Any]:
    if not isinstance(item, Mapping) or item.get("type") != "text" or MARK not in str(item.get("text")):
        yield item
        return
    for text_index, text in enumerate(str(item["text"]).split(MARK)):
        if text_index:
            yield {"type": "image"}
        if text:
            yield {"type": "text", "text": text}


def is_image(item: Any) -> bool:
    """True if a message part has an image, or a place for one."""
    return isinstance(item, Mapping) and item.get("type") in ("image", "image_url")


def is_blank(item: Any) -> bool:
    """True if a part is a place for an image from the row's column."""
    return is_image(item) and _image_source(item) is None


def _image_source(value: Any) -> Any:
    """Text or bytes that name an image, if any."""
    while isinstance(value, Mapping):
        value = value["bytes"] if value.get("bytes") else next(filter(None, map(value.get, _SOURCE_KEYS)), None)
    return value


def _from_data_url(url: str, name: str, max_pixels: int = MAX_PIXELS) -> Image:
    header, _, text = url.partition(",")
    try:
        if not header.endswith(";base64"):
            raise ValueError("it is not base64")
        return checked_image(base64.b64decode(text, validate=True), name, max_pixels)
    except ValueError as error:
        raise error if isinstance(error, ImageError) else ImageError(f"{name} is not a data URL: {error}") from None


def _read_image(value: Any, image_number: int, folder: Path) -> Image:
    name = f"image {image_number}"
    if isinstance(value, bytes):
        return checked_image(value, name)
    if not isinstance(value, str):
        raise ImageError(f"{name} is a {type(value).__name__}: give a path, a data URL or bytes")
    if value.startswith("data:"):
        return _from_data_url(value, name)
    if value.startswith(("http://", "https://")):
        raise ImageError(f"{name} is a URL ({value:.80}), and nothing is downloaded: save it, and give its path")
    path = folder / (unquote(urlsplit(value).path) if value.startswith("file://") else value)
    try:
        data = read_regular(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise ImageError(f"{name} ({path}) cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if data.startswith(POINTER):
        raise ImageError(f"{name} ({path}) is a Git LFS pointer, not the file itself: {LFS_HINT}")
    return checked_image(data, f"{name} ({path})")
