"""The task of the template vision: the splits, the pictures and the demonstrations."""

from __future__ import annotations

from shapes import CAREFUL, COLOURS, Shapes, demonstrations

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.prompts import is_held_out

TASK = Shapes()


def test_image_rows_are_the_same_to_the_byte_at_every_call_and_size() -> None:
    few, many = TASK.prompts("train", 5), Shapes().prompts("train", 40)
    assert list(few) == many[:5]
    assert len({prompt.uid for prompt in many}) == 40
    assert len({prompt.images[0].digest for prompt in many}) > 35


def test_images_of_the_splits_show_different_scenes() -> None:
    scenes = {split: {prompt.fields["cells"] for prompt in TASK.prompts(split, 400)} for split in ("train", "eval")}
    assert not scenes["train"] & scenes["eval"]
    assert not any(is_held_out(row.fields["cells"]) for row in demonstrations("train", 300))


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
        assert answer == row.fields["answer"]
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
