"""`inspect buffer` names the images of a rollout, from the journal alone."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

from PIL import Image as Pillow

from asyncrl_cli.inspect.buffer_pages import rollout_page
from asyncrl_cli.inspect.decoding import content_text
from asyncrl_cli.inspect.report.samples import IMAGE_SIDE, samples
from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.journal.schema import FILE, open_for_reading
from asyncrl_cli.records.groups import BufferSettings, Candidate, Outcome
from asyncrl_cli.records.images import Image, PlacedImage
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import Scored
from asyncrl_cli.runs.directory import RunDirectory
from tests.data.pictures import picture
from tests.journal.buffer_stand_ins import rollout

SETTINGS = BufferSettings(1, 1, 1, "wait", 10, 1, False)


def test_a_rollouts_page_names_its_images(tmp_path: Path) -> None:
    red = Image.from_bytes(picture("red"))
    content = (
        {"role": "user", "content": [{"type": "image", "image": red.digest}, {"type": "text", "text": "what?"}]},
    )
    book = DurableLedger(tmp_path / FILE, SETTINGS)
    prompt = Prompt("p", content, {}, (red,))
    loader = {"epoch": 0, "position": 1}
    book.admit([Candidate(1, prompt, (5, 6, 6, 7), loader, (PlacedImage(red, 1, 2),))])
    book.record([rollout("0-0")], [Outcome("0-0", Scored(1.0))])
    book.journal.commit(book.journal.noted())
    book.journal.close()

    page = rollout_page(RunDirectory(tmp_path), open_for_reading(tmp_path / FILE), "0-0")
    assert any(f"[image {red.digest}]what?" in line for line in page.lines)
    assert page.document["images"] == [{"image": red.digest, "start": 1, "tokens": 2}]
    json.dumps(page.document)
    assert content_text(content) == f"user: [image {red.digest}]what?"


def test_report_shows_small_copies_of_a_rollouts_images(tmp_path: Path) -> None:
    large = Image.from_bytes(picture("green", 2 * IMAGE_SIDE, IMAGE_SIDE))
    content = ({"role": "user", "content": [{"type": "image", "image": large.digest}]},)
    book = DurableLedger(tmp_path / FILE, SETTINGS)
    candidate = Candidate(1, Prompt("p", content, {}, (large,)), (5, 6), {"epoch": 0, "position": 1})
    book.admit([candidate])
    book.record([rollout("0-0")], [Outcome("0-0", Scored(1.0))])
    assert book.take(0) is None
    book.journal.commit(book.journal.noted())
    book.journal.close()

    shown, *_ = samples(open_for_reading(tmp_path / FILE), None)
    (url,) = shown.images
    start, _, encoded = url.partition(",")
    assert start == "data:image/png;base64"
    with Pillow.open(io.BytesIO(base64.b64decode(encoded))) as small:
        assert small.size == (IMAGE_SIDE, IMAGE_SIDE // 2)
