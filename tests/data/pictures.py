"""Encoded pictures, for tests of images."""

from __future__ import annotations

import io

from PIL import Image as Pillow


def picture(color: str = "red", width: int = 56, height: int = 84, kind: str = "PNG", **options: object) -> bytes:
    """An encoded picture of one color."""
    file = io.BytesIO()
    Pillow.new("RGB", (width, height), color).save(file, kind, **options)
    return file.getvalue()


def animation() -> bytes:
    """A GIF of two frames."""
    return picture(kind="GIF", save_all=True, append_images=[Pillow.new("RGB", (56, 84), "blue")])
