"""Links between documentation pages lead somewhere, and the list of pages is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("templates/*/*.md")]
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        if anchor:
            assert anchor in anchors(other), target
        if page.is_relative_to(ROOT / "templates") and page.parent.name != "grafana":
            assert other.is_relative_to(page.parent), f"{target}: `asyncrl init` copies the template's folder alone"


def test_the_list_of_pages_is_complete() -> None:
    listed = re.findall(r"\(([\w-]+\.md)\)", (ROOT / "docs/README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted({page.name for page in ROOT.glob("docs/*.md")} - {"README.md"})
    assert "(docs/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_documentation_lists_every_decision() -> None:
    listed = set(re.findall(r"\(decisions/([^)]+)\)", (ROOT / "docs/README.md").read_text(encoding="utf-8")))
    assert listed == {page.name for page in ROOT.glob("docs/decisions/*.md")}
