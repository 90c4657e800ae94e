"""Only journal/ has SQL on the journal's tables, and only its writer's files change rows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncrl_cli

pytestmark = pytest.mark.slow

PACKAGE = Path(asyncrl_cli.__file__).parent
WRITES = re.compile(r"\b(INSERT|UPDATE|DELETE|REPLACE|DROP|ALTER|CREATE)\b")


def sources(word: str = "", pattern: str = "**/*.py") -> Iterator[tuple[str, ast.Module]]:
    """The modules with a word in their text."""
    for path in sorted(PACKAGE.glob(pattern)):
        if word in (text := path.read_text()):
            yield path.relative_to(PACKAGE).as_posix(), ast.parse(text)


def test_no_other_package_runs_sql() -> None:
    found = {
        name
        for name, tree in sources("execute")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("execute", "executemany", "executescript")
    }
    assert {name for name in found if not name.startswith("journal/")} == set()


def test_readers_do_not_write() -> None:
    found = {
        name
        for name, tree in sources(pattern="journal/**/*.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and WRITES.search(node.value)
    }
    writers = {"journal/schema.py", "journal/file.py", "journal/writer.py"}
    assert found == writers
