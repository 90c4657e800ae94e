"""Rows with images: their forms, the errors that name file and row, and the tokens that a model sees."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow
from pyarrow import parquet
from transformers import AutoProcessor, AutoTokenizer

from asyncrl_cli.core.errors import ConfigError, DataError
from asyncrl_cli.data.images import MARK, ImageError, ImageTokens, checked_image, with_column
from asyncrl_cli.data.loader import PromptLoader
from asyncrl_cli.data.prompt_encoder import PromptEncoder
from asyncrl_cli.data.rows import CollectedPrompts
from asyncrl_cli.data.sources import read_source
from asyncrl_cli.data.tokenizer import character_tokenizer
from asyncrl_cli.orchestrator.prompt_source import PROMPTS_WITH_IMAGES, PromptSource
from asyncrl_cli.records.images import Image, ImageCache, PixelError, data_url
from asyncrl_cli.records.prompt import Prompt, image_digests, prompt_from, to_json
from asyncrl_cli.spec.inputs import SplitSpec
from tests.data.pictures import picture
from tests.small_models import IMAGE_FOLDERS, IMAGE_MODELS

pytestmark = pytest.mark.slow

RED, BLUE = picture("red"), picture("blue", 112, 112)
RED_URL = f"data:image/png;base64,{base64.b64encode(RED).decode()}"


def text(of: str) -> dict[str, Any]:
    return {"type": "text", "text": of}


def image(of: object) -> dict[str, Any]:
    return {"type": "image", "image": of}


def user(*parts: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(RED)
    (tmp_path / "pictures" / "blue.png").write_bytes(BLUE)
    return tmp_path


def rows_of(folder: Path, *rows: dict[str, Any]) -> Sequence[Prompt]:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps({'images': None, **row})}\n" for row in rows))
    return read_source(SplitSpec(path="rows.jsonl", image_column="images"), "train", folder)


WANTED = user(image(Image.from_bytes(RED).digest), text("and "), image(Image.from_bytes(BLUE).digest), text("?"))
FORMS: dict[str, dict[str, Any]] = {
    "parts with paths": {
        "prompt": user(image("pictures/red.png"), text("and "), image("pictures/blue.png"), text("?"))
    },
    "data URLs as OpenAI writes them": {
        "prompt": user(
            {"type": "image_url", "image_url": {"url": RED_URL}}, text("and "), image("pictures/blue.png"), text("?")
        )
    },
    "marks in text": {"prompt": "<image>and <image>?", "images": [RED_URL, "pictures/blue.png"]},
    "marks in messages": {
        "prompt": [{"role": "user", "content": "<image>and <image>?"}],
        "images": ["pictures/red.png", {"path": "pictures/blue.png"}],
    },
    "parts without images": {
        "prompt": user({"type": "image"}, text("and "), {"type": "image"}, text("?")),
        "images": [{"image": "pictures/red.png"}, {"bytes": None, "path": "pictures/blue.png"}],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_a_row_with_images_give_the_same_prompt(folder: Path, form: str) -> None:
    (prompt,) = rows_of(folder, FORMS[form])
    assert list(prompt.content) == WANTED
    assert [found.data for found in prompt.images] == [RED, BLUE]
    assert prompt.fields == {}


def test_parquet_has_images_as_bytes_or_paths_with_uids_by_content(folder: Path) -> None:
    structs = [{"bytes": RED, "path": None}, {"bytes": None, "path": "pictures/blue.png"}]
    rows = [{"prompt": "<image>and <image>?", "images": structs}, {"prompt": "no image", "images": []}]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    with_images, without = read_source(SplitSpec(path="rows.parquet", image_column="images"), "train", folder)
    assert list(with_images.content) == WANTED and without.content == "no image"
    rows[0]["images"] = [{"bytes": BLUE, "path": None}, structs[1]]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    assert read_source(SplitSpec(path="rows.parquet", image_column="images"), "train", folder)[0].uid != with_images.uid


def test_files_of_images_are_read_at_each_access_and_not_before(folder: Path) -> None:
    prompts = rows_of(folder, *({"prompt": "what?", "images": f"pictures/{name}.png"} for name in ("red", "late")))
    assert isinstance(prompts, CollectedPrompts) and prompts[0].images == (Image.from_bytes(RED),)
    with pytest.raises(DataError, match=r"late\.png"):
        prompts[1]
    (folder / "pictures" / "late.png").write_bytes(BLUE)
    assert prompts[1].images == (Image.from_bytes(BLUE),)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"prompt": "?", "images": "none.png"}, r"image 1 \(.*none\.png\) cannot be read: No such file"),
    "no image": ({"prompt": "?", "images": "rows.jsonl"}, "not an image of a known format"),
    "truncated": ({"prompt": "?", "images": "cut.png"}, r"image 1 \(.*cut\.png\) is broken"),
    "bomb": ({"prompt": "?", "images": "bomb.png"}, "9000 x 9000 pixels, more than"),
    "pipe": ({"prompt": "?", "images": "pipe.png"}, r"pipe\.png\) cannot be read: it is not a regular file"),
    "device": ({"prompt": "?", "images": "/dev/zero"}, "it is not a regular file"),
    "folder": ({"prompt": "?", "images": "pictures"}, "cannot be read: (it is not a regular file|Is a directory)"),
    "sparse": ({"prompt": "?", "images": "sparse.png"}, "cannot be read: it has 1,099,511,627,776 bytes"),
    "too few marks": ({"prompt": "<image>?", "images": ["a", "b"]}, "2 images, and 1 places for them"),
    "too many marks": ({"prompt": "<image><image>?", "images": "a"}, "1 images, and 2 places for them"),
    "URL": ({"prompt": "?", "images": "https://a.org/b.png"}, "nothing is downloaded"),
    "no base64": ({"prompt": "?", "images": "data:image/png,abc"}, "not a data URL: it is not base64"),
    "twice": ({"prompt": user(image(RED_URL)), "images": RED_URL}, "in its messages and in a column"),
    "a number": ({"prompt": "?", "images": 3}, "image 1 is a int: give a path"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_images_are_refused_with_file_and_line(folder: Path, kind: str) -> None:
    (folder / "cut.png").write_bytes(picture("red", 300, 300, compress_level=0)[:5000])
    if kind == "pipe":
        os.mkfifo(folder / "pipe.png")
    if kind == "sparse":
        (folder / "sparse.png").touch()
        os.truncate(folder / "sparse.png", 2**40)
    if kind == "bomb":
        (folder / "bomb.png").write_bytes(picture("white", 9000, 9000))
    row, message = WRONG[kind]
    with pytest.raises(DataError, match=message) as caught:
        rows_of(folder, {"prompt": "fine"}, row)[1]
    assert caught.value.location == f"{folder / 'rows.jsonl'}:2"


def test_pixels_of_more_than_8_bits_are_refused_with_their_mode() -> None:
    for pixels, mode in ((np.array([[0.5]], np.float32), "F"), (np.array([[700]], np.uint16), "I;16")):
        file = io.BytesIO()
        Pillow.fromarray(pixels).save(file, "TIFF")
        with pytest.raises(ImageError, match=f"the image has pixels of mode {mode}: save it as RGB"):
            checked_image(file.getvalue())
        with pytest.raises(PixelError, match=f"pixels of mode {mode}"):
            data_url(Pillow.fromarray(pixels))


@pytest.mark.parametrize(
    ("mode", "kind"), [("1", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("RGBA", "PNG"), ("CMYK", "JPEG")]
)
def test_a_picture_of_every_common_mode_is_read(mode: str, kind: str) -> None:
    file = io.BytesIO()
    made = Pillow.new("RGB", (8, 8), "white").convert(mode)
    made.save(file, kind)
    sent = base64.b64decode(data_url(made).partition(",")[2])
    for data in (file.getvalue(), sent):
        assert checked_image(data).decoded().getpixel((4, 4)) == (255, 255, 255)


def test_an_animation_is_refused_and_a_photograph_with_a_preview_is_not() -> None:
    second_frame = [Pillow.new("RGB", (8, 8), "blue")]
    with pytest.raises(ImageError, match="animated: it has more than one frame"):
        checked_image(picture(kind="GIF", save_all=True, append_images=second_frame))
    photograph = picture(kind="MPO", save_all=True, append_images=second_frame)
    assert checked_image(photograph).decoded().size == (56, 84)


texts = st.text(st.characters(codec="ascii", exclude_characters="<"), max_size=9)


@given(st.lists(texts, min_size=1, max_size=5), st.booleans())
def test_marks_are_replaced_in_order_and_texts_are_kept(pieces: list[str], as_messages: bool) -> None:
    joined = MARK.join(pieces)
    names = [str(number) for number in range(len(pieces) - 1)]
    content: Any = tuple(user(text(joined))) if as_messages else joined
    if not names:
        with pytest.raises(ImageError):
            with_column(f"{joined}{MARK}", ["a", "b"])
        return
    (message,) = with_column(content, names)
    assert [part["image"] for part in message["content"] if part["type"] == "image"] == names
    assert "".join(part["text"] if part["type"] == "text" else MARK for part in message["content"]) == joined


# -- tokens


@pytest.fixture(scope="module", params=IMAGE_MODELS)
def model(request: pytest.FixtureRequest) -> str:
    """Folder with config, tokenizer and processor of a small model."""
    return str(IMAGE_FOLDERS / request.param)


def encoder(model: str, max_images: int = 2, max_pixels: int = 10**6, max_tokens: int = 500) -> PromptEncoder:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return PromptEncoder(tokenizer, max_tokens, images=ImageTokens(model, max_images, max_pixels))


def two_images() -> Prompt:
    images = Image.from_bytes(RED), Image.from_bytes(BLUE)
    content = ({"role": "user", "content": WANTED[0]["content"]},)
    return Prompt("p", content, {}, images)


def test_a_prompt_with_images_has_the_ids_of_the_models_own_processor_and_their_places(model: str) -> None:
    prompt = two_images()
    found = encoder(model).encode_with_images(prompt)
    processor = AutoProcessor.from_pretrained(model)
    chat = [{"role": "user", "content": [{"type": "image"}, text("and "), {"type": "image"}, text("?")]}]
    rendered = processor.apply_chat_template(chat)
    whole = processor(text=[rendered], images=[[one.decoded() for one in prompt.images]], return_tensors="pt")
    assert found is not None and list(found.ids) == whole["input_ids"][0].tolist()
    gemma = "image_grid_thw" not in whole
    sizes = [processor.image_seq_length] * 2 if gemma else (whole["image_grid_thw"].prod(-1) // 4).tolist()
    assert [placed.length for placed in found.images] == sizes
    assert [placed.image for placed in found.images] == list(prompt.images)
    (pad,) = processor.image_token_ids
    inside = {at for placed in found.images for at in range(placed.offset, placed.offset + placed.length)}
    assert inside == {at for at, token in enumerate(found.ids) if token == pad}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_images": 0}, "model.max_images is 0"),
        ({"max_images": 1}, r"2 images, more than model.max_images \(1\)"),
        ({"max_pixels": 112 * 112 - 1}, r"image 2 has 112 x 112 = 12,544 pixels, more than data.image_max_pixels"),
    ],
)
def test_images_beyond_a_limit_are_refused_with_its_key(model: str, limits: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        encoder(model, **limits).encode(two_images())


def test_a_placeholder_in_the_rows_text_stays_text(model: str) -> None:
    mark = AutoProcessor.from_pretrained(model).image_token
    forged, plain = (
        encoder(model).encode_with_images(
            Prompt("p", tuple(user(image(Image.from_bytes(RED).digest), text(words))), {}, (Image.from_bytes(RED),))
        )
        for words in (f"a{mark}b", "a")
    )
    assert forged and plain and forged.images == plain.images
    assert encoder(model).decode(forged.ids[forged.images[0].end :]).endswith(f"a{mark}b")


def test_a_template_that_shows_no_image_is_refused(model: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for part in messages[0]['content'] %}{{ part['text'] or part }}{% endfor %}"
    prompt = Prompt("p", tuple(user(image(Image.from_bytes(RED).digest), text("what?"))), {}, (Image.from_bytes(RED),))
    with pytest.raises(DataError, match="1 images"):
        PromptEncoder(tokenizer, 500, images=ImageTokens(model, 2, 10**6)).encode(prompt)


def test_a_text_model_has_no_processor(tmp_path: Path) -> None:
    character_tokenizer(256).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match="no processor for images can be loaded") as caught:
        ImageTokens(str(tmp_path), 2, 10**6).encode("a", [Image.from_bytes(RED)])
    assert caught.value.location == "model.max_images"


def test_a_row_with_a_lost_image_is_skipped_with_a_warning_and_counted(folder: Path, model: str) -> None:
    names = ["red", "lost", *["blue"] * 9]
    rows = rows_of(folder, *({"prompt": "what?", "images": f"pictures/{name}.png"} for name in names))
    warnings: list[str] = []
    source = PromptSource(PromptLoader(rows, 0, shuffle=False), encoder(model), warn=warnings.append)
    assert asyncio.run(source.prepare(10)) == PROMPTS_WITH_IMAGES
    assert source.skipped == 1 and "rows.jsonl:2: image 1" in warnings[0] and "skipped_prompts" in warnings[0]
    candidates = [source.candidate() for _ in range(10)]
    assert [candidate.serial for candidate in candidates] == [*range(1, 11)]
    assert [candidate.images[0].image.data for candidate in candidates] == [RED, *[BLUE] * 9]
    assert candidates[-1].loader["position"] == 11


def test_a_prompt_with_images_survives_json() -> None:
    prompt = two_images()
    again = prompt_from(json.loads(json.dumps(to_json(prompt))))
    assert again == Prompt("p", tuple(WANTED), {}, prompt.images)
    assert image_digests(again.content) == [one.digest for one in again.images]


@given(
    asked=st.lists(st.integers(0, 5), max_size=40),
    sizes=st.lists(st.integers(0, 9), min_size=6, max_size=6),
    limit=st.integers(0, 20),
)
def test_cache_keeps_what_was_used_last_within_its_limit(asked: list[int], sizes: list[int], limit: int) -> None:
    made: list[int] = []

    def make(image: Image) -> int:
        made.append(image.data[0])
        return image.data[0]

    cache, kept = ImageCache(make, nbytes=sizes.__getitem__, limit=limit), list[int]()
    for number in asked:
        before = len(made)
        assert cache.get(Image.from_bytes(bytes([number]))) == number
        assert (len(made) == before) is (number in kept)
        kept = [one for one in kept if one != number] + [number]
        while sum(sizes[one] for one in kept) > limit and len(kept) > 1:
            kept.pop(0)
