"""Questions about pictures of coloured shapes, which a 0.5M-parameter vision-language model learns in minutes.

A picture has 2 × 2 cells; each is empty or has one shape. The response names the cells row by row, by a letter for the
colour and one for the shape, adds a running count if the question asks for a number, and then answers. For `how many
red?` it is `rc1 --1 bt1 rs2#2`. ``demonstrations`` teaches a model that can look but mostly guesses; reinforcement
finds that looking pays.

Invariant: a hash of a scene's cells decides its split (``prompts.is_held_out``).
"""

from __future__ import annotations

import io
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from asyncrl_cli.records.images import Image
from asyncrl_cli.records.prompt import Message, Prompt
from asyncrl_cli.tasks.base import Split
from asyncrl_cli.tasks.prompts import LazyPrompts, is_held_out

COLOURS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220), "yellow": (240, 200, 30)}
SHAPES = ("circle", "square", "triangle")
SIDE = 2
"""Number of rows, and of cells in a row."""
FILLED = 0.75
"""Share of cells with a shape."""
CELL = 28
"""Pixels of a cell's side: one image token of a Qwen2.5-VL."""
CAREFUL = 0.3
"""Share of demonstrations that look before they answer."""
Thing = tuple[str, str] | None
"""Colour and shape, or an empty cell."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture's cells, row by row, and a question about it with its answer."""

    cells: Sequence[Thing]
    question: str
    answer: str
    answers: Sequence[str]
    """Possible answers, for guesses."""
    counted: Collection[str] | None = None
    """Colours or shapes to count; None if the question does not ask for a number."""

    @property
    def working(self) -> str:
        """The response before the answer."""
        if self.counted is None:
            return _description(self.cells)
        totals = accumulate(thing is not None and not set(self.counted).isdisjoint(thing) for thing in self.cells)
        return " ".join(f"{_description([thing])}{total:d}" for thing, total in zip(self.cells, totals, strict=True))

    def drawn(self, rng: random.Random) -> bytes:
        """The picture as PNG. ``rng`` chooses the position and size of each shape within its cell."""
        from PIL import Image as Pillow
        from PIL import ImageDraw

        picture = Pillow.new("RGB", (SIDE * CELL, SIDE * CELL), "white")
        draw = ImageDraw.Draw(picture)
        for index, thing in enumerate(self.cells):
            size = rng.randint(CELL - 10, CELL - 4)
            row, column = divmod(index, SIDE)
            x = column * CELL + rng.randint(1, CELL - size - 1)
            y = row * CELL + rng.randint(1, CELL - size - 1)
            if thing is None:
                continue
            colour, shape = COLOURS[thing[0]], thing[1]
            if shape == "triangle":
                draw.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill=colour)
            else:
                (draw.ellipse if shape == "circle" else draw.rectangle)((x, y, x + size, y + size), fill=colour)
        written = io.BytesIO()
        picture.save(written, "PNG")
        return written.getvalue()


class Shapes:
    """A task that draws its own pictures."""

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        """Return ``size`` rows of the split; row ``i`` is the same for every size, to the byte of its picture."""

        def row(index: int) -> Prompt:
            uid = f"shapes/{split}/{index}"
            rng = random.Random(uid)
            return _prompt(uid, _scene(rng, split), rng)

        return LazyPrompts(size, row)

    def reward(self, prompt: Prompt, response: str, finished: bool) -> float:
        """1.0 if the response ended and the text after its last ``#`` is the answer, else 0.0."""
        _, mark, answer = response.rpartition("#")
        return float(finished and bool(mark) and answer.strip() == prompt.fields["answer"])


def demonstrations(split: Split, size: int) -> Iterator[Prompt]:
    """Yield conversations for `model.warm_start.data`: a share ``CAREFUL`` looks first, the others guess."""
    rng = random.Random(0)
    for index in range(size):
        scene = _scene(rng, split)
        response = f"{scene.working}#{scene.answer}" if rng.random() < CAREFUL else f"#{rng.choice(scene.answers)}"
        yield _prompt(f"shapes/demonstration/{index}", scene, rng, {"role": "assistant", "content": response})


def _prompt(uid: str, scene: Scene, rng: random.Random, *replies: Message) -> Prompt:
    image = Image.from_bytes(scene.drawn(rng))
    content = [{"type": "image", "image": image.digest}, {"type": "text", "text": scene.question}]
    fields = {"answer": scene.answer, "cells": _description(scene.cells)}
    return Prompt(uid, ({"role": "user", "content": content}, *replies), fields, (image,))


def _description(cells: Sequence[Thing]) -> str:
    return " ".join("--" if thing is None else thing[0][0] + thing[1][0] for thing in cells)


def _thing(rng: random.Random) -> Thing:
    return (rng.choice(list(COLOURS)), rng.choice(SHAPES)) if rng.random() < FILLED else None


def _scene(rng: random.Random, split: Split) -> Scene:
    while True:
        cells = [_thing(rng) for _ in range(SIDE * SIDE)]
        if is_held_out(_description(cells)) == (split == "eval"):
            return rng.choice(rng.choice(_scenes(cells)))


def _scenes(cells: Sequence[Thing]) -> list[list[Scene]]:
    """Every question that the cells answer, grouped by kind."""
    things = [thing for thing in cells if thing is not None]
    totals = [str(total) for total in range(len(cells) + 1)]
    counted = {"how many?": tuple(COLOURS)}
    counted |= {f"how many {colour}?": (colour,) for colour in COLOURS}
    counted |= {f"how many {shape}s?": (shape,) for shape in SHAPES}
    counts = [
        Scene(cells, text, str(sum(not set(names).isdisjoint(thing) for thing in things)), totals, names)
        for text, names in counted.items()
    ]
    colours = [
        Scene(cells, f"which colour is the {shape}?", colour, list(COLOURS))
        for colour, shape in things
        if [thing[1] for thing in things].count(shape) == 1
    ]
    left_things = [thing for thing in cells[::SIDE] if thing is not None]
    sides = [Scene(cells, "which shape is left?", shape, SHAPES) for _, shape in left_things if len(left_things) == 1]
    return [kind for kind in (counts, colours, sides) if kind]
