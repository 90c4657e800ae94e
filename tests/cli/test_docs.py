"""Documentation pages: links lead somewhere, lists of pages are complete, and names and numbers are true."""

from __future__ import annotations

import re
from importlib import import_module
from inspect import isclass, isfunction
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("templates/*/*.md")]
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def page_text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def anchor(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return set(map(anchor, re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        if fragment:
            assert fragment in anchors(other), target
        if page.is_relative_to(ROOT / "templates") and page.parent.name != "grafana":
            assert other.is_relative_to(page.parent), f"{target}: `asyncrl init` copies the template's folder alone"


def test_the_list_of_pages_is_complete() -> None:
    listed = re.findall(r"\(([\w-]+\.md)\)", (ROOT / "docs/README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted({page.name for page in ROOT.glob("docs/*.md")} - {"README.md"})
    assert "(docs/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


IMPORT = re.compile(
    r"^ *(?:from (asyncrl_cli[\w.]*) import ([^#\n(]+|\([^)]*\))|import (asyncrl_cli[\w.]*))", re.MULTILINE
)
STABLE = {
    module: set(re.findall(r"`(\w+)`", names))
    for module, names in re.findall(
        r"^\| `(asyncrl_cli[\w.]*)` \| ([^|]+) \|", page_text("docs/extending.md"), re.MULTILINE
    )
}


@pytest.mark.parametrize("module", STABLE)
def test_imports_for_user_code_exist_and_are_documented(module: str) -> None:
    imported = import_module(module)
    for name in STABLE[module]:
        value = getattr(imported, name)  # a class, a function, or a type's or a constant's name
        assert value.__doc__ or not (isclass(value) or isfunction(value)), f"{module}.{name} has no docstring"


def test_templates_and_pages_import_only_names_for_user_code() -> None:
    pages = [page for page in ROOT.glob("docs/*.md") if page.name != "one-step.md"]
    for file in [ROOT / "README.md", *pages, *ROOT.glob("templates/**/*.py")]:
        for module, names, whole in IMPORT.findall(file.read_text(encoding="utf-8")):
            imported = set(re.findall(r"\w+", names))
            assert (module or whole) in STABLE and imported <= STABLE.get(module, set()), f"{file.name}: {module}"


def test_the_tables_of_extending_name_files_that_exist() -> None:
    text = page_text("docs/extending.md").partition("## Where to add what")[2].partition("## A first change")[0]
    for path in re.findall(r"`([\w/]+(?:/|\.py))`", text):
        assert (ROOT / "asyncrl_cli" / path).exists() or (ROOT / "tests" / path).exists() or (ROOT / path).is_dir(), (
            path
        )
    for name, path in re.findall(r"`(\w+)` (?:in|of) `([\w/]+\.py)`", text):
        assert re.search(rf"\b{name}\b", page_text(f"asyncrl_cli/{path}")), f"{name} in {path}"


def numbers(text: str) -> set[float]:
    return {float(number.replace(",", "")) for number in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.]*\w)", text)}


README_LIST, _, README_REST = page_text("README.md").partition("\n**Status.**")
RUN_OF_README = README_REST.partition("GRPO then teaches it")[2].partition("\nThen look at it")[0]
CLAIMS = [claim for claim in [*README_LIST.split("\n- ")[1:], RUN_OF_README] if re.search(r"\d", claim)]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.partition("**")[2].partition("**")[0] or "run")
def test_a_claim_of_the_readme_with_numbers_has_a_measurement(claim: str) -> None:
    """The linked section has each number, the command, the machine and the day. Of a run only the results count."""
    sections = [
        section
        for section in page_text("docs/performance.md").split("\n## ")
        if f"docs/performance.md#{anchor(section.partition(chr(10))[0])}" in claim
    ]
    assert sections, "link the section of docs/performance.md"
    text = "\n".join(sections)
    results = (
        claim[claim.rindex("finished 60 steps") :] if "finished 60 steps" in claim else re.sub(r"\(.*?\)", "", claim)
    )
    assert numbers(results) <= numbers(text)
    for section in sections:
        assert re.search(r"`(make|python|asyncrl) [^`]+`", section), "no command"
        assert re.search(r"EPYC|Xeon|H100|H200", section), "no machine"
        assert re.search(r"20\d\d-\d\d-\d\d", section), "no day"
