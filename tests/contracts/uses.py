"""Finds asyncrl's uses of vLLM and DeepSpeed in its code: imports, calls, and members of their objects.

A name refers to an object of these libraries if it is imported, annotated with one of their classes, assigned from one
of their calls, or listed in ``objects.OBJECTS``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.contracts.objects import OBJECTS, RESULTS

ASYNCRL = Path(__file__).parents[2] / "asyncrl_cli"
LIBRARIES = ("vllm", "deepspeed")

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Names = dict[str, str]
"""Meanings of expressions in our code: dotted names in the libraries, with ``()`` for an object of a class."""


@dataclass(frozen=True)
class Use:
    """One use. ``target``: a dotted name, with ``()`` where the object of a class begins, as ``a.B().method``."""

    place: str
    text: str
    target: str
    positional: int = 0
    keywords: tuple[str, ...] = ()
    more: bool = False  # passed by * or **, so required arguments may be included
    call: bool = False

    @property
    def library(self) -> str:
        """The top-level package."""
        return self.target.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


@dataclass(frozen=True)
class Unknown:
    """An object of these libraries with used members and an unknown class."""

    place: str
    name: str
    origin: str


def uses_in(source: str, file: str) -> tuple[list[Use], list[Unknown]]:
    """All uses in the source of one file."""
    reader = _Reader(file)
    reader.read(ast.parse(source))
    return reader.uses, reader.unknown


def all_uses() -> tuple[list[Use], list[Unknown]]:
    """All uses in asyncrl."""
    uses: list[Use] = []
    unknown: list[Unknown] = []
    for path in sorted(ASYNCRL.rglob("*.py")):
        source, file = path.read_text(), str(path.relative_to(ASYNCRL))
        if file in {key.partition(":")[0] for key in OBJECTS} or any(name in source for name in LIBRARIES):
            found, missing = uses_in(source, file)
            uses += found
            unknown += missing
    return uses, unknown


class _Reader:
    def __init__(self, file: str) -> None:
        self.file = file
        self.uses: list[Use] = []
        self.unknown: list[Unknown] = []
        self.returns: Names = {}  # by name of our functions in this file

    def read(self, module: ast.Module) -> None:
        names: Names = {}
        for node in ast.walk(module):  # imports for type checking only have the same meaning in all functions
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                self._imports(node.body, names)
        for node in module.body:
            if isinstance(node, FUNCTIONS) and node.returns is not None and (made := self._named(node.returns, names)):
                self.returns[node.name] = f"{made}()"
        self._scope(module, names | OBJECTS.get(self.file, {}))

    def _scope(self, scope: ast.AST, outer: Mapping[str, str]) -> None:
        """Read a module, class or function, with the meaning of its names."""
        names = dict(outer)
        if isinstance(scope, ast.ClassDef):
            for base in scope.bases:
                dotted = self._named(base.value if isinstance(base, ast.Subscript) else base, names)
                if dotted:
                    names["self"] = f"{dotted}()"
            names = {f"self.{name}": "" for name in _members(scope)} | names
            names |= OBJECTS.get(f"{self.file}:{scope.name}", {})
        if isinstance(scope, FUNCTIONS):
            names |= OBJECTS.get(f"{self.file}:{scope.name}", {})
            for argument in [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs]:
                if argument.annotation is not None and (dotted := self._named(argument.annotation, names)):
                    names[argument.arg] = f"{dotted}()"
        own = list(_own(scope))
        self._imports([node for node in own if isinstance(node, ast.Import | ast.ImportFrom)], names)
        for node in own:
            self._assigned(node, names)
        for node in own:
            self._used(node, names)
        for node in own:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
                self._scope(node, names)

    def _imports(self, body: Sequence[ast.AST], names: Names) -> None:
        for node in body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition(".")[0] in LIBRARIES:
                        local = alias.asname or alias.name.partition(".")[0]
                        names[local] = alias.name if alias.asname else local
                        self._add(node, alias.name, f"import {alias.name}")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES:
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    self._add(node, f"{node.module}.{alias.name}", f"from {node.module} import {alias.name}")

    def _assigned(self, node: ast.AST, names: Names) -> None:
        """Names that are assigned the result of a call to these libraries."""
        value: ast.expr | None = None
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            value, targets = node.value, node.targets
        elif isinstance(node, ast.AnnAssign):
            if dotted := self._named(node.annotation, names):
                names[ast.unparse(node.target)] = f"{dotted}()"
                return
            value, targets = node.value, [node.target]
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            value, targets = node.context_expr, [node.optional_vars]
        if isinstance(value, ast.Await):
            value = value.value
        if value is None or not isinstance(value, ast.Call | ast.Attribute):
            return
        found = self._named(value, names)
        if found is None:
            return
        for target in targets:
            first = target.elts[0] if isinstance(target, ast.Tuple) else target
            text = ast.unparse(first.value if isinstance(first, ast.Starred) else first)
            names.setdefault(text, found)

    def _used(self, node: ast.AST, names: Names) -> None:
        if isinstance(node, ast.Call) and (target := self._named(node.func, names)):
            keywords = tuple(one.arg for one in node.keywords if one.arg is not None)
            stars = any(isinstance(one, ast.Starred) for one in node.args)
            more = stars or any(one.arg is None for one in node.keywords)
            positional = sum(not isinstance(one, ast.Starred) for one in node.args)
            self._add(node, target, ast.unparse(node), positional, keywords, more, call=True)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            target = self._named(node, names)
            if target:
                self._add(node, target, ast.unparse(node))

    def _named(self, node: ast.expr, names: Mapping[str, str]) -> str | None:
        """Resolve an expression; None if it is not from these libraries."""
        text = ast.unparse(node)
        if text in names:
            return names[text] or None
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            return names.get(node.value) or None
        if isinstance(node, ast.Attribute):
            owner = self._named(node.value, names)
            if owner is None:
                return None
            if owner.endswith("?"):
                self._add_unknown(node, owner[:-1])
                return None
            owner = RESULTS.get(owner, owner)
            return f"{owner}.{node.attr}" if owner else None
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in self.returns:
                return self.returns[node.func.id]
            called = self._named(node.func, names)
            if called is None or called.endswith(("()", "?")):
                return None
            if called in RESULTS:
                return RESULTS[called] or None
            return f"{called}()" if _is_class(called) else f"{called}?"
        return None

    def _add(
        self,
        node: ast.AST,
        target: str,
        text: str,
        positional: int = 0,
        keywords: tuple[str, ...] = (),
        more: bool = False,
        call: bool = False,
    ) -> None:
        # Python, a metaclass or a library below defines names such as __dict__, __members__ and __struct_fields__.
        if not target.endswith(("?", "()", "__")) and target.partition(".")[0] in LIBRARIES:
            place = f"asyncrl_cli/{self.file}:{getattr(node, 'lineno', 0)}"
            self.uses.append(Use(place, " ".join(text.split())[:120], target, positional, keywords, more, call))

    def _add_unknown(self, node: ast.Attribute, origin: str) -> None:
        found = Unknown(f"asyncrl_cli/{self.file}:{node.lineno}", ast.unparse(node), origin)
        if found not in self.unknown:
            self.unknown.append(found)


def _is_class(dotted: str) -> bool:
    return dotted.rpartition(".")[2][:1].isupper()


def _members(scope: ast.ClassDef) -> Iterator[str]:
    """Names that one of our classes defines itself."""
    for node in ast.walk(scope):
        if isinstance(node, FUNCTIONS):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a scope in the order of the source. Nested scopes are included, but not their nodes."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield from _own(child)
        elif not isinstance(child, ast.Lambda):
            for decorator in child.decorator_list:
                yield decorator
                yield from _own(decorator)
