"""Images of prompts and conversations, and their places among the tokens."""

from __future__ import annotations

import base64
import hashlib
import io
import sys
from dataclasses import dataclass
from typing import Any

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image, such as a PNG file. Messages refer to it by its digest: ``{"type": "image", "image": digest}``.

    Rollouts of a group share one object, so pickling a batch of them copies its bytes once.
    """

    digest: str
    """BLAKE2b of ``data``, in hexadecimal."""
    data: bytes

    @classmethod
    def of(cls, data: bytes) -> Image:
        """The image with these bytes, unchecked."""
        return cls(hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest(), data)

    @property
    def file_name(self) -> str:
        """A name for a file with its bytes: digest and suffix of its format."""
        from PIL import Image as Pillow

        with Pillow.open(io.BytesIO(self.data)) as opened:
            return f"{self.digest}.{(opened.format or 'image').lower()}"

    def decoded(self) -> Any:
        """The pixels that every processor gets: a PIL image in RGB, turned upright, transparent parts on white.

        Raises as PIL does if it cannot read the bytes.
        """
        from PIL import Image as Pillow
        from PIL import ImageOps

        with Pillow.open(io.BytesIO(self.data)) as opened:
            image = ImageOps.exif_transpose(opened)
            if not image.has_transparency_data:
                return image.convert("RGB")
            image = image.convert("RGBA")
            return Pillow.alpha_composite(Pillow.new("RGBA", image.size, "white"), image).convert("RGB")


def data_url(image: Any) -> str:
    """The data URL of an ``Image``, a Pillow image or the bytes of an image file; text is returned unchanged.

    Raises ``TypeError`` for anything else.
    """
    if isinstance(image, str):
        return image
    if is_pillow(image):
        written = io.BytesIO()
        image.save(written, "PNG")
        image = written.getvalue()
    data = image.data if isinstance(image, Image) else image
    if not isinstance(data, bytes):
        raise TypeError(f"an image is a {type(image).__name__}: give a Pillow image, the bytes of a file or a data URL")
    return f"data:image/*;base64,{base64.b64encode(data).decode()}"


def is_pillow(value: Any) -> bool:
    """Whether this is a Pillow image. Pillow is not imported for it."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in a token sequence: its placeholder tokens, which the model replaces by its features, are
    ``offset``, ``offset + 1``, ... of the whole sequence (prompt and response), ``length`` of them."""

    image: Image
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The index after its last placeholder."""
        return self.offset + self.length
