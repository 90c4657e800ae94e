"""Code of a documentation page, for tests that run it."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def code_blocks(page: str, heading: str, language: str) -> list[str]:
    """Return the code blocks in a language below a heading, up to the next heading of the same level."""
    text = (DOCS / page).read_text(encoding="utf-8")
    level = heading.partition(" ")[0]
    section = text.partition(f"\n{heading}\n")[2].partition(f"\n{level} ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
