"""The words of the project: what users read is plain standard English with the field's terms, in one style.

Words are looked for in asyncrl_cli (messages, help texts, docstrings and comments), tests/, benchmarks/, templates/,
specs/, README.md, CONTRIBUTING.md and docs/; some more in the keys of JSON and in names of the code.
Messages and hints of errors, problems and findings begin in lower case and have no full stop at the end.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "asyncrl_cli"
CODE = ("asyncrl_cli", "tests", "benchmarks")

INSTEAD = {
    r"mend(s|ed|ing)?": "fix; hint",
    r"spells?": "engine request",
    r"(un)?told": "notified, passed, given",
    r"said": "printed, stated, reported",
    r"says? no": "has no, lacks",
    r"befall(s|en)?|befell": "happens to",
    r"for ever|forever": "without limit",
    r"of then": "of that time",
    r"anew": "again, new",
    r"condemn(s|ed|ing)?": "mark as dead, reject",
    r"breach(es|ed)?": "violation",
    r"conductors?": "orchestrator",
    r"followers?": "trainer recovery",
    r"guardians?": "reaper",
    r"lag(s|ged|ging)?": "staleness",
    r"(go|goes|going|gone|went) on": "continue",
    r"(give|gives|given|giving|gave) up": "stop, abandon",
    r"(no|some)body": "no user, another process",
    r"aside": "away, temporary, archived",
    r"(?<!there )(is|are) no(?! longer| more| need)": "is not a",
    r"in its midst": "halfway",
    r"of no account": "not used",
    r"sees? (to|off|through)": "handle, reap, finish",
    r"come(s)? (about|to pass)": "happen",
    r"cut short": "truncated",
    r"left out": "omitted, skipped; default",
    r"(held|holds?) (it|them|the run|a run) back": "limit, delay",
    r"(?<!asyncio\.)runners?": "episode worker",
}
"""What not to write, as regular expressions, and what to write instead."""
KEYS = {r"place": "index, location", r"cut": "truncated", r"stay": "request", r"lag": "staleness", r"mend": "hint"}
"""What a key of JSON, a metric or a column is not called, in part or whole."""
NAMES = re.compile(
    r"(?<!a)(?<!com)mend|befall|condemn|breach|conductor|follower|guardian|anew|see_off|take_back|"
    r"give_up|giv(en|ing)_up|go_on|going_on"
)
"""What no function, class, argument or attribute is called, in part or whole."""
ALLOWED = {
    ("asyncrl_cli/spec/rules/machine.py", "runner"): "the name of an argument of vLLM",
    ("asyncrl_cli/rollout/vllm_sampler.py", "runner"): "vLLM's name of what runs the model in a worker",
    ("tests/contracts/vllm_contract.py", "runner"): "vLLM's name of what runs the model in a worker",
    ("tests/rollout/test_vllm_sampler.py", "runner"): "vLLM's name of what runs the model in a worker",
    ("tests/gateway/test_responses.py", "runner"): "a class of openai-agents",
    ("tests/e2e/gateway/library_agents.py", "runner"): "a class of openai-agents",
    ("tests/e2e/gateway/test_serve.py", "spell"): "the text of a prompt",
    ("tests/spec/mutations.py", "nobody"): "the name of a user of Linux",
    ("tests/tasks/test_math_forms.py", "is no"): "the text of an answer",
}
"""File, and what stands there for a reason."""
PROPER = {
    "Weights",
    "Ray",
    "Ray's",
    "DeepSpeed",
    "MLflow",
    "Python",
    "Python's",
    "SQLite",
    "Linux",
    "Jinja",
    "Hugging",
    "OpenAI",
}
"""Names with which a message may begin; so may one with a word in capitals."""


class Text(NamedTuple):
    """One line of a text that users read."""

    file: str
    line: int
    text: str


@cache
def sources() -> list[tuple[str, list[ast.AST]]]:
    """The modules of the package: path below the repository, and the nodes of the syntax tree."""
    paths = sorted(PACKAGE.rglob("*.py"))
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in paths)
    return [(path.relative_to(ROOT).as_posix(), list(ast.walk(tree))) for path, tree in zip(paths, trees, strict=True)]


@cache
def lines() -> tuple[Text, ...]:
    """All lines of the package, the tests, the benchmarks, the documentation, the specs and the templates."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "specs").glob("*")]
    paths += (path for path in (ROOT / "templates").rglob("*") if path.suffix in (".md", ".yaml", ".py"))
    paths += (path for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    return tuple(
        Text(path.relative_to(ROOT).as_posix(), number, line)
        for path in sorted(path for path in paths if path.is_file() and path != Path(__file__))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    )


def misused(texts: Iterable[Text], instead: dict[str, str]) -> Iterator[str]:
    """Where a word is written that should not be, with the line and what to write."""
    pattern = re.compile("|".join(rf"\b(?:{word})\b" for word in instead))  # named groups would be 15 times as slow
    for file, line, text in texts:
        for match in pattern.finditer(text.lower()):  # twice as fast as a pattern that ignores case
            if (file, match[0]) not in ALLOWED:
                better = next(better for word, better in instead.items() if re.fullmatch(word, match[0]))
                yield f"{file}:{line}: {match[0]!r} -> {better}: {text.strip()[:110]}"


def keys() -> Iterator[Text]:
    """String literals that name something for programs, such as ``response/tokens_mean``, as words."""
    for file, nodes in sources():
        for node in nodes:
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if re.fullmatch(r"[a-z]+([_/][a-z]+)*", text):
                yield Text(file, getattr(node, "lineno", 0), re.sub(r"[_/]", " ", text))


def titles() -> Iterator[Text]:
    """The names of all tests, as words."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if found := re.match(r"\s*(?:async )?def (test_\w+)", line):
                yield Text(path.relative_to(ROOT).as_posix(), number, found[1].replace("_", " "))


def test_texts_use_standard_words() -> None:
    found = list(misused(lines(), INSTEAD))
    assert not found, f"{len(found)} to reword:\n" + "\n".join(found)


def test_names_of_tests_use_standard_words() -> None:
    found = list(misused(titles(), INSTEAD))
    assert not found, "\n" + "\n".join(found)


def test_keys_use_standard_words() -> None:
    found = list(misused(keys(), KEYS))
    assert not found, "\n" + "\n".join(found)


def test_names_use_standard_words() -> None:
    code = [text for text in lines() if text.file.endswith(".py")]
    found = [f"{file}:{line}: {text.strip()}" for file, line, text in code if NAMES.search(text.lower())]
    assert not found, "\n" + "\n".join(found)


# -- messages


def user_errors() -> set[str]:
    """The names of ``UserError`` and of the classes that derive from it."""
    classes = [node for _, nodes in sources() for node in nodes if isinstance(node, ast.ClassDef)]
    known: set[str] = {"UserError"}
    while (
        more := {
            node.name for node in classes for base in node.bases if isinstance(base, ast.Name) and base.id in known
        }
        - known
    ):
        known |= more
    return known


def ends(node: ast.expr, last: bool) -> Iterator[str]:
    """What the text of an expression begins with, or ends with, as far as the source has it."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=[_, *_]):
            yield from ends(node.values[-1 if last else 0], last)
        case ast.BinOp(op=ast.Add()):
            yield from ends(node.right if last else node.left, last)
        case ast.IfExp():
            yield from (*ends(node.body, last), *ends(node.orelse, last))
        case ast.BoolOp(values=options):
            yield from (text for option in options for text in ends(option, last))


def messages() -> Iterator[tuple[str, int, ast.expr]]:
    """Messages and hints: arguments of errors, problems and findings, and variables of these names."""
    errors = user_errors() - {"SpecError"}
    arguments = {"Problem": (1, 2), "Finding": (2, 3)} | dict.fromkeys(errors, (0,))
    for file, nodes in sources():
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in arguments:
                given = [node.args[index] for index in arguments[node.func.id] if index < len(node.args)]
                given += [keyword.value for keyword in node.keywords if keyword.arg in ("message", "found", "hint")]
                yield from ((file, argument.lineno, argument) for argument in given)
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("message", "hint"):
                yield file, node.lineno, node.value


def unstyled(node: ast.expr) -> list[str]:
    """What is wrong with how a message begins and ends."""
    wrong = [f"begins in upper case: {text[:60]!r}" for text in ends(node, last=False) if begins_a_sentence(text)]
    wrong += [f"ends with a full stop: {text[-60:]!r}" for text in ends(node, last=True) if re.search(r"[^.]\.$", text)]
    return wrong


def begins_a_sentence(text: str) -> bool:
    word = (text.split() or [""])[0].rstrip(",:;")
    return word[:1].isupper() and word[1:].islower() and word not in PROPER


def test_messages_have_one_style() -> None:
    # The gateway's messages have OpenAI's form.
    all_messages = [message for message in messages() if not message[0].startswith("asyncrl_cli/gateway/")]
    assert len(all_messages) > 400, "they are found"
    found = [f"{file}:{line}: {what}" for file, line, node in all_messages for what in unstyled(node)]
    assert not found, "\n" + "\n".join(found)


# -- the rules can fail


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("The run goes on.", "goes on"),
        ("mend the spec", "mend"),
        ("`x` is no module:name", "is no"),
        ("they were Told", "told"),
        ("a spell on an engine", "spell"),
    ],
)
def test_a_word_is_found(text: str, word: str) -> None:
    (found,) = misused([Text("page.md", 3, text)], INSTEAD)
    assert found.startswith(f"page.md:3: {word!r} -> ")


@pytest.mark.parametrize(
    "text", ["there is no checkpoint", "amended, spelling, spell_backward", "it is no longer there"]
)
def test_other_words_are_not_found(text: str) -> None:
    assert list(misused([Text("page.md", 1, text)], INSTEAD)) == []


@pytest.mark.parametrize(
    ("source", "problems"),
    [
        ("'no such file'", 0),
        ("'Ray is not installed'", 0),
        ("f'{name} is missing; CUDA finds none...'", 0),
        ("'Remove it'", 1),
        ("f'{name} is missing.'", 1),
        ("'Lower it.' if x else 'raise ' + 'it.'", 3),
    ],
)
def test_a_style_is_found(source: str, problems: int) -> None:
    assert len(unstyled(ast.parse(source, mode="eval").body)) == problems
