"""docs/troubleshooting.md quotes messages that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
OWN = PAGE[PAGE.index("Messages of asyncrl:") :]
MESSAGES = [
    message
    for line in OWN.splitlines()
    if line.startswith("| `")
    for message in re.findall(r"`([^`]+)`", line.split("|")[1])
]


@cache
def texts() -> str:
    """All texts of the code, one per line, with `…` for variable parts."""
    found = []
    for file in ROOT.glob("asyncrl_cli/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_in_the_code(message: str) -> None:
    parts = [re.escape(part) for part in message.split("…")]
    assert re.search(".*".join(parts), texts()), message
