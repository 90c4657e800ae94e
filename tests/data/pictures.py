"""Encoded pictures, for tests of images."""

from __future__ import annotations

import io

from PIL import Image as Pillow


def picture(color: str = "red", width: int = 56, height: int = 84, kind: str = "PNG", **options: object) -> bytes:
    """An encoded picture of one color."""
    file = io.BytesIO()
    Pillow.new("RGB", (width, height), color).save(file, kind, **options)
    return file.getvalue()
