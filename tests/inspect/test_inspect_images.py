"""`inspect buffer` names the images of a rollout, from the journal alone."""

from __future__ import annotations

import base64
import io
import json
import sqlite3
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
from tests.journal.buffer_stand_ins import commit, rollout

SETTINGS = BufferSettings(1, 1, 1, "wait", 10, 1, False)


def journal_with(folder: Path, candidate: Candidate) -> sqlite3.Connection:
    """A journal whose batch has a group of one rollout."""
    book = DurableLedger(folder / FILE, SETTINGS)
    book.admit([candidate])
    book.record([rollout("0-0")], [Outcome("0-0", Scored(1.0))])
    assert book.take(0) is None
    commit(book)
    book.journal.close()
    return open_for_reading(folder / FILE)


def test_a_rollouts_page_names_its_images(tmp_path: Path) -> None:
    red = Image.from_bytes(picture("red"))
    content = (
        {"role": "user", "content": [{"type": "image", "image": red.digest}, {"type": "text", "text": "what?"}]},
    )
    prompt, loader = Prompt("p", content, {}, (red,)), {"epoch": 0, "position": 1}
    journal = journal_with(tmp_path, Candidate(1, prompt, (5, 6, 6, 7), loader, (PlacedImage(red, 1, 2),)))
    page = rollout_page(RunDirectory(tmp_path), journal, "0-0")
    assert any(f"[image {red.digest}]what?" in line for line in page.lines)
    assert page.document["images"] == [{"image": red.digest, "start": 1, "tokens": 2}]
    json.dumps(page.document)
    assert content_text(content) == f"user: [image {red.digest}]what?"


def test_report_shows_small_copies_of_a_rollouts_images(tmp_path: Path) -> None:
    large = Image.from_bytes(picture("green", 2 * IMAGE_SIDE, IMAGE_SIDE))
    content = ({"role": "user", "content": [{"type": "image", "image": large.digest}]},)
    prompt = Prompt("p", content, {}, (large,))
    shown, *_ = samples(journal_with(tmp_path, Candidate(1, prompt, (5, 6), {"epoch": 0, "position": 1})), None)
    (url,) = shown.images
    start, _, encoded = url.partition(",")
    assert start == "data:image/png;base64"
    with Pillow.open(io.BytesIO(base64.b64decode(encoded))) as small:
        assert small.size == (IMAGE_SIDE, IMAGE_SIDE // 2)
