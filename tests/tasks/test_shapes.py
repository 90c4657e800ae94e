"""The task of the template vision: the splits, the pictures, the answers and the demonstrations."""

from __future__ import annotations

from collections import Counter

from shapes import CAREFUL, COLOURS, Shapes, demonstrations

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.prompts import is_held_out

TASK = Shapes()


def question_of(prompt: Prompt) -> str:
    assert not isinstance(prompt.content, str)
    assert prompt.content[0]["role"] == "user"
    image, text = prompt.content[0]["content"]
    assert image == {"type": "image", "image": prompt.images[0].digest}
    return str(text["text"])


def answer_by_reading(cells: str, question: str) -> str:
    """Find the answer in the description only."""
    colours, shapes = {name[0]: name for name in COLOURS}, {"c": "circle", "s": "square", "t": "triangle"}
    things = [(colours[cell[0]], shapes[cell[1]]) if cell != "--" else None for cell in cells.split()]
    words = question.rstrip("?").split()
    if words[0] == "how":
        wanted = words[2].removesuffix("s") if len(words) > 2 else None
        return str(sum(thing is not None and (wanted is None or wanted in thing) for thing in things))
    if words[1] == "colour":
        (colour,) = [thing[0] for thing in things if thing and thing[1] == words[-1]]
        return colour
    (shape,) = [thing[1] for thing in (things[0], things[2]) if thing]
    return shape


def test_image_rows_are_the_same_to_the_byte_at_every_call_and_size() -> None:
    few, many = TASK.prompts("train", 5), Shapes().prompts("train", 40)
    assert list(few) == many[:5]
    assert len({prompt.uid for prompt in many}) == 40
    assert len({prompt.images[0].digest for prompt in many}) > 35


def test_images_of_the_splits_show_different_scenes() -> None:
    scenes = {split: {prompt.fields["cells"] for prompt in TASK.prompts(split, 400)} for split in ("train", "eval")}
    assert not scenes["train"] & scenes["eval"]
    assert not any(is_held_out(row.fields["cells"]) for row in demonstrations("train", 300))


def test_answers_follow_from_the_cells_for_every_kind_of_question() -> None:
    prompts = TASK.prompts("eval", 300)
    kinds = Counter(" ".join(question_of(prompt).split()[:2]) for prompt in prompts)
    assert set(kinds) == {"how many?", "how many", "which colour", "which shape"}
    for prompt in prompts:
        assert prompt.fields["answer"] == answer_by_reading(prompt.fields["cells"], question_of(prompt)), prompt.uid


def test_image_shows_the_colours_of_its_cells() -> None:
    for prompt in TASK.prompts("train", 30):
        picture = prompt.images[0].decoded()
        assert picture.size == (56, 56)
        for index, cell in enumerate(prompt.fields["cells"].split()):
            row, column = divmod(index, 2)
            found = picture.crop((28 * column, 28 * row, 28 * column + 28, 28 * row + 28)).getcolors()
            colours = {colour for _, colour in found} - {(255, 255, 255)}
            assert colours == ({rgb for name, rgb in COLOURS.items() if name[0] == cell[0]})


def test_demonstrations_of_shapes_are_right_if_they_look_and_otherwise_guess() -> None:
    guesses = 0
    for row in demonstrations("train", 500):
        assert not isinstance(row.content, str)
        cells, mark, answer = row.content[1]["content"].partition("#")
        assert mark and answer
        if not cells:
            guesses += 1
            continue
        assert [cell[:2] for cell in cells.split()] == row.fields["cells"].split()
        assert question_of(row).startswith("which") or cells[-1] == answer
        assert answer == row.fields["answer"] == answer_by_reading(row.fields["cells"], question_of(row))
    assert 1 - CAREFUL - 0.1 < guesses / 500 < 1 - CAREFUL + 0.1


def test_reward_wants_the_end_and_the_exact_answer() -> None:
    prompt = Prompt("p", "", {"answer": "red"})
    responses = {
        "#red": True,
        "rc -- bs ..#red": True,
        "##red ": True,
        "red": False,
        "#redd": False,
        "#red#blue": False,
    }
    assert {text: bool(TASK.reward(prompt, text, True)) for text in responses} == responses
    assert TASK.reward(prompt, "#red", False) == 0.0
