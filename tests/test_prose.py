"""The measure of plain English (`python -m tests.prose`) finds marked constructions and accepts plain sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prose import main, measure


@pytest.mark.parametrize(
    ("sentence", "marked"),
    [
        ("Its values are those\nof the step before.", ["those of"]),
        ("What the gateway serves, and whose keys it knows.", ["What the", "whose"]),
        ("A folder of its own, so that 2 engine(s) fit.", ["of its own", "so that", "e(s)"]),
        ("Its values equal the last step's values. See ``what of which``.", []),
        ("Somewhat faster; run it to see what happens.", []),
    ],
)
def test_marked_constructions_are_found(sentence: str, marked: list[str]) -> None:
    assert [found for _, found in measure(sentence)[1]] == marked


def test_docstrings_and_comments_above_the_limit_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = tmp_path / "module.py"
    module.write_text('text = "whose"\n\n\ndef f():\n    """Start it.\n\n    For a run whose name is known."""\n')
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[0] == f"{module}:7: whose"
    module.write_text("# Start it.\n")
    assert main([str(tmp_path)]) == 0


def test_code_in_markdown_does_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Runs\n\n```\nwhose\n```\n\nThe `whose` of\nwhich is code.\n")
    assert main([str(page)]) == 1
    assert capsys.readouterr().out.splitlines()[0] == f"{page}:7: of which"
