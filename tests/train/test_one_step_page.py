"""docs/one-step.md is correct: its code gives the numbers that it shows, and the functions that it links to exist."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "one-step.md"
LINKS = re.findall(r"\[`([\w.]+)`\]\(\.\./([\w/]+)\.py\)", PAGE.read_text())


def test_the_code_gives_the_numbers_on_the_page() -> None:
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert (failed, tried > 15) == (0, True)


@pytest.mark.parametrize(("name", "file"), sorted(set(LINKS)))
def test_the_functions_it_links_to_are_there(name: str, file: str) -> None:
    assert callable(attrgetter(name)(import_module(file.replace("/", "."))))


def test_it_links_to_every_algorithm() -> None:
    files = {Path(file).stem for _, file in LINKS if "algorithms" in file}
    folder = PAGE.parents[1] / "asyncrl_cli" / "train" / "algorithms"
    assert files == {path.stem for path in folder.glob("*.py")} - {"__init__"}
