"""Images in prompts and conversations, and their places among the tokens (decision 0102)."""

from __future__ import annotations

import base64
import hashlib
import io
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

DIGEST_BYTES = 16
DECODED_BYTES = 2**26
"""Bytes of decoded images that a process keeps. An image is needed twice when it is read, for the check and for the
model, and again at each turn of its conversation."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image, such as a PNG file. Messages refer to it by its digest: ``{"type": "image", "image": digest}``.

    Rollouts of a group share one object, so pickling a batch of them copies its bytes once.
    """

    digest: str
    """BLAKE2b of ``data``, in hexadecimal."""
    data: bytes

    @classmethod
    def from_bytes(cls, data: bytes) -> Image:
        """The image with these bytes, unchecked."""
        return cls(hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest(), data)

    def decoded(self) -> Any:
        """The pixels for every processor: a PIL image in RGB, turned upright, transparent parts on white.

        Callers share the object: copy it before you change it. Raises PIL's errors if the bytes are not an image.
        """
        return _DECODED.get(self)


class ImageCache(Generic[T]):
    """Caches the results of ``make`` for images, up to ``limit`` bytes; the least recently used is dropped first.
    Threads may share it."""

    def __init__(self, make: Callable[[Image], T], nbytes: Callable[[T], int], limit: int) -> None:
        self._make, self._nbytes, self._limit = make, nbytes, limit
        self._results: OrderedDict[str, T] = OrderedDict()  # by digest
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, image: Image) -> T:
        """The result for the image, made now or earlier. Raises the errors of ``make``."""
        with self._lock:
            if image.digest in self._results:
                self._results.move_to_end(image.digest)
                return self._results[image.digest]
        result = self._make(image)  # without the lock: threads decode different images at the same time
        with self._lock:
            if image.digest not in self._results:  # otherwise another thread was faster
                self._results[image.digest] = result
                self._bytes += self._nbytes(result)
            while self._bytes > self._limit and len(self._results) > 1:
                self._bytes -= self._nbytes(self._results.popitem(last=False)[1])
        return result


class PixelError(ValueError):
    """An image has pixels whose colours are unknown; ``str`` describes them."""


def _decode(image: Image) -> Any:
    from PIL import Image as Pillow
    from PIL import ImageOps

    with Pillow.open(io.BytesIO(image.data)) as opened:
        return _in_rgb(ImageOps.exif_transpose(opened))


def _in_rgb(picture: Any) -> Any:
    """Convert a PIL image to RGB. Raises ``PixelError`` for modes that Pillow would clip (16 bits), and for modes
    that it cannot convert."""
    from PIL import Image as Pillow

    if picture.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"):
        raise PixelError(f"pixels of mode {picture.mode}: save it as RGB, or as grey, with 8 bits")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    return Pillow.alpha_composite(Pillow.new("RGBA", picture.size, "white"), picture).convert("RGB")


_DECODED = ImageCache[Any](_decode, nbytes=lambda pixels: 3 * pixels.width * pixels.height, limit=DECODED_BYTES)


def data_url(image: Any) -> str:
    """The data URL of an ``Image``, a Pillow image or the bytes of an image file; text is returned unchanged. Raises
    ``TypeError`` for anything else, and ``PixelError``."""
    if isinstance(image, str):
        return image
    if is_pillow(image):
        png = io.BytesIO()
        _in_rgb(image).save(png, "PNG")
        image = png.getvalue()
    data = image.data if isinstance(image, Image) else image
    if not isinstance(data, bytes):
        raise TypeError(f"an image is a {type(image).__name__}: give a Pillow image, the bytes of a file or a data URL")
    return f"data:image/*;base64,{base64.b64encode(data).decode()}"


def is_pillow(value: Any) -> bool:
    """True for a Pillow image. Does not import Pillow."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in a token sequence. The model replaces its ``length`` placeholder tokens, from ``offset`` of the whole
    sequence (prompt and response) on, by its features."""

    image: Image
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The index after its last placeholder."""
        return self.offset + self.length
