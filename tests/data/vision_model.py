"""A processor of Qwen2.5-VL with a token for each character, and pictures, for tests of images. It has no weights."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image as Pillow
from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from asyncrl_cli.train.model.tokenizer import character_tokenizer

TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def save_processor(folder: Path) -> str:
    """Write the processor's files; returns the folder."""
    tokenizer = character_tokenizer(512)
    marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    tokenizer.chat_template = TEMPLATE
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=112 * 112),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return str(folder)


def picture(color: str = "red", width: int = 56, height: int = 84, kind: str = "PNG", **options: object) -> bytes:
    """An encoded picture of one color."""
    file = io.BytesIO()
    Pillow.new("RGB", (width, height), color).save(file, kind, **options)
    return file.getvalue()


def animation() -> bytes:
    """A GIF of two frames."""
    return picture(kind="GIF", save_all=True, append_images=[Pillow.new("RGB", (56, 84), "blue")])
