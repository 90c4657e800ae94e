"""A warm start on demonstrations and rows with images: the answer is in the picture."""

from __future__ import annotations

import io
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.records.images import Image
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import WarmStart
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.conversations import Rows
from asyncrl_cli.train.warm_start import warm_start
from tests.train.pictures import saved_model

pytestmark = pytest.mark.slow

COLOURS = ("red", "blue")


def coloured(name: str) -> Image:
    from PIL import Image as images

    written = io.BytesIO()
    images.new("RGB", (56, 56), name).save(written, "PNG")
    return Image.from_bytes(written.getvalue())


def conversation(name: str) -> Prompt:
    image = coloured(name)
    question = [{"type": "image", "image": image.digest}, {"type": "text", "text": "colour?"}]
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": name})
    return Prompt(name, messages, images=(image,))


class Colours:
    """Demonstrations with an image, and one of text alone."""

    def prompts(self, split: str, size: int) -> list[Prompt]:
        return []

    def reward(self, prompt: Prompt, response: str) -> float:
        return 0.0

    def demonstration(self, rng: random.Random, clean: bool) -> Any:
        name = rng.choice((*COLOURS, "none"))
        return ("colour?", "none") if name == "none" else conversation(name)


def spec_of(**model: Any) -> ExperimentSpec:
    loaded = load_spec("specs/quickstart.yaml", ["model.warm_start=null"]).spec
    return loaded.model_copy(update={"model": loaded.model.model_copy(update={"max_images": 1, **model})})


def answers(folder: Path) -> dict[str, str]:
    """The most probable first letters for each colour."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor: Any = AutoProcessor.from_pretrained(folder)
    found = {}
    for name in COLOURS:
        text = processor.tokenizer.apply_chat_template(list(conversation(name).content[:1]), tokenize=False)
        inputs = processor(text=[text], images=[coloured(name).decoded()], return_tensors="pt")
        with torch.no_grad():
            found[name] = processor.tokenizer.decode(model(**inputs).logits[0, -1].argmax())
    return found


@pytest.mark.parametrize("source", ["demonstrations", "rows"])
def test_the_model_learns_to_answer_by_the_image(tmp_path: Path, source: str) -> None:
    saved_model("qwen2_5_vl", tmp_path / "in")
    settings = WarmStart(steps=60, batch_size=6, warmup_steps=5, matrix_learning_rate=0.02)
    rows: Any = Colours() if source == "demonstrations" else Rows([conversation(name) for name in COLOURS], str)
    losses: list[float] = []
    warm_start(
        tmp_path / "in",
        rows,
        settings,
        max_length=64,
        seed=0,
        directory_out=tmp_path / "out",
        progress=lambda done, total, loss, skipped: losses.append(loss),
        run=spec_of(),
    )
    assert losses[-1] < 0.1
    assert answers(tmp_path / "out") == {"red": "r", "blue": "b"}


def test_threads_change_nothing_and_the_frozen_tower_stays(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    saved_model("qwen2_5_vl", tmp_path / "in")
    for threads in (1, 2):
        settings = WarmStart(steps=3, batch_size=12, warmup_steps=1, threads=threads)
        out = tmp_path / str(threads)
        warm_start(tmp_path / "in", Colours(), settings, 64, 0, out, run=spec_of())  # type: ignore[arg-type]
    before, one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "1", "2"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    changed = {name for name in one if not torch.equal(one[name], before[name])}
    assert any("merger" in name for name in changed), "the projector is trained"
    assert not any("visual" in name and "merger" not in name for name in changed)
    assert (tmp_path / "1/processor_config.json").read_bytes() == (tmp_path / "in/processor_config.json").read_bytes()


def test_a_demonstration_with_more_images_than_allowed_is_named(tmp_path: Path) -> None:
    saved_model("qwen2_5_vl", tmp_path / "in")

    class Twice(Colours):
        def demonstration(self, rng: random.Random, clean: bool) -> Any:
            prompt = conversation("red")
            return replace(prompt, content=(prompt.content[0], *prompt.content))

    rows: Any = Twice()
    settings = WarmStart(steps=1, batch_size=12)
    with pytest.raises(UserError, match=r"the demonstration 'red' cannot be encoded: 2 images, more than model.max_im"):
        warm_start(tmp_path / "in", rows, settings, 64, 0, tmp_path / "out", run=spec_of())
