"""Count constructions that make English hard to read, per 1,000 words of docstrings, comments and Markdown.

    python -m tests.prose [PATH...]

Prints the worst files and the total; the exit code is 1 above ``LIMIT``. A match shows where to look: the sentence
usually needs a noun instead of a pronoun, or an active verb, or it should be split.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

LIMIT = 2.0
WORST = 15  # files to print
FOLDERS = ["asyncrl_cli", "tests", "benchmarks", "templates", "requirements", "docs", "README.md", "CONTRIBUTING.md"]
MARKED = (
    r"\b(?:that|those|the ones?) of\b|\bof (?:which|whom|those)\b|\b(?:by|for|in) which\b|\bwhose\b",
    r"(?:^|[.:;,(] )what (?!if|happens)\w+|\b(?:is|are|says?|knows?|has|have|of|for|to|with) what\b",
    r"\bbeside\b|\bso that\b|\bof (?:its|their|one's) own\b|\bas it is\b|\b(?:can be had|(?:is|are) to be)\b|\w\(s\)",
)
PATTERN = re.compile("|".join(MARKED).replace(" ", r"\s+"), re.IGNORECASE)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and texts: docstrings and comments of a Python file, or the paragraphs of a Markdown file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        hidden = re.sub(r"^( *)```.*?^\1```", lambda code: "\n" * code[0].count("\n"), source, flags=re.S | re.M)
        for paragraph in re.finditer(r"(?:.+\n?)+", hidden):
            yield hidden.count("\n", 0, paragraph.start()) + 1, paragraph[0]
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(docstring))):
                yield node.lineno, docstring
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def measure(text: str) -> tuple[int, list[tuple[int, str]]]:
    """Number of words, and each marked construction with its line; code in backticks counts as one word."""
    plain = re.sub(r"``.+?``|`.+?`|\]\(.*?\)", "x", text)
    found = [(plain.count("\n", 0, match.start()), " ".join(match[0].split())) for match in PATTERN.finditer(plain)]
    return len(re.findall(r"[A-Za-z][\w'-]*", plain)), found


def main(paths: list[str]) -> int:
    words, matches = 0, dict[Path, list[str]]()
    for root in map(Path, paths or FOLDERS):
        for path in [root] if root.is_file() else sorted((*root.rglob("*.py"), *root.rglob("*.md"))):
            for line, text in prose(path):
                count, marked = measure(text)
                words += count
                matches.setdefault(path, []).extend(f"{path}:{line + offset}: {found}" for offset, found in marked)
    for found in sorted(filter(None, matches.values()), key=len, reverse=True)[:WORST]:
        print("\n".join(found))
    total = 1000 * sum(map(len, matches.values())) / max(words, 1)
    print(f"{total:.1f} marked constructions per 1,000 words, {words} words")
    return int(total > LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
