"""Messages and hints of errors, problems and findings have one style: they begin in lower case and end without a full
stop. The gateway's messages are an exception: they have OpenAI's form."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROPER = {
    *("Weights", "Ray", "Ray's", "DeepSpeed", "MLflow", "Python", "Python's", "SQLite", "Linux", "Jinja"),
    *("Hugging", "OpenAI"),
}
"""Names with which a message may begin. It may also begin with a word in capitals."""


def sources() -> Iterator[tuple[str, list[ast.AST]]]:
    """Each module of the package: its path, and the nodes of its syntax tree."""
    for path in sorted((ROOT / "asyncrl_cli").rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def user_errors(modules: list[tuple[str, list[ast.AST]]]) -> set[str]:
    """The names of ``UserError`` and of the classes that derive from it."""
    classes = [node for _, nodes in modules for node in nodes if isinstance(node, ast.ClassDef)]
    bases = {node.name: {base.id for base in node.bases if isinstance(base, ast.Name)} for node in classes}
    known: set[str] = {"UserError"}
    while more := {name for name in bases if bases[name] & known} - known:
        known |= more
    return known


def ends(node: ast.expr, last: bool) -> Iterator[str]:
    """The first text of an expression, or its last one, as far as the source has it."""
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
    """Messages and hints: arguments of errors, problems and findings, and variables with these names."""
    modules = list(sources())
    errors = user_errors(modules) - {"SpecError"}
    arguments = {"Problem": (1, 2), "Finding": (2, 3)} | dict.fromkeys(errors, (0,))
    for file, nodes in modules:
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in arguments:
                given = [node.args[index] for index in arguments[node.func.id] if index < len(node.args)]
                given += [keyword.value for keyword in node.keywords if keyword.arg in ("message", "found", "hint")]
                yield from ((file, argument.lineno, argument) for argument in given)
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("message", "hint"):
                yield file, node.lineno, node.value


def faults_of(node: ast.expr) -> list[str]:
    """The faults in how a message begins and ends."""
    faults = [f"begins in upper case: {text[:60]!r}" for text in ends(node, last=False) if begins_a_sentence(text)]
    faults += [
        f"ends with a full stop: {text[-60:]!r}" for text in ends(node, last=True) if re.search(r"[^.]\.$", text)
    ]
    return faults


def begins_a_sentence(text: str) -> bool:
    word = (text.split() or [""])[0].rstrip(",:;")
    return word[:1].isupper() and word[1:].islower() and word not in PROPER


def test_messages_begin_in_lower_case_and_end_without_a_full_stop() -> None:
    found = [message for message in messages() if not message[0].startswith("asyncrl_cli/gateway/")]
    assert len(found) > 400, "the search finds the messages"
    faults = [f"{file}:{line}: {fault}" for file, line, node in found for fault in faults_of(node)]
    assert not faults, "\n" + "\n".join(faults)
