"""Reads names, signatures and members of a package from its source, without importing it.

So it can also read modules that need a GPU, and releases that are not installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from pathlib import Path

DEFAULT = "has one"
"""Stands for a default value: only its existence matters."""
PART_OF = (ast.If, ast.Try, ast.With)
"""Statements in a module or class with bodies that define further names of it."""


@dataclass(frozen=True, eq=False)
class Definition:
    """A statement that defines a name; None for a whole module."""

    package: Package
    module: str
    node: ast.stmt | None


@dataclass
class Package:
    """The packages below one folder, such as site-packages or an unpacked wheel."""

    root: Path
    _trees: dict[str, ast.Module | None] = field(default_factory=dict)
    _found: dict[str, Definition | None] = field(default_factory=dict)

    def tree(self, module: str) -> ast.Module | None:
        """A module's syntax tree; None if it has no source."""
        if module not in self._trees:
            path = self.root.joinpath(*module.split("."))
            files = [path / "__init__.py", path.with_suffix(".py")]
            source = next((file.read_text() for file in files if file.is_file()), None)
            self._trees[module] = None if source is None else ast.parse(source)
        return self._trees[module]

    def find(self, dotted: str) -> Definition | None:
        """Resolve a dotted name, through re-exports; None if the source does not define it."""
        if dotted not in self._found:
            self._found[dotted] = self._find(dotted, frozenset())
        return self._found[dotted]

    def _find(self, dotted: str, seen: frozenset[str]) -> Definition | None:
        if dotted in seen:
            return None
        seen |= {dotted}
        if self.tree(dotted) is not None:
            return Definition(self, dotted, None)
        owner, _, name = dotted.rpartition(".")
        found = self._find(owner, seen) if owner else None
        if found is None:
            return None
        if found.node is None:
            return self._in_module(found.module, name, seen)
        return self.member(found, name) if isinstance(found.node, ast.ClassDef) else None

    def _in_module(self, module: str, name: str, seen: frozenset[str]) -> Definition | None:
        tree = self.tree(module)
        assert tree is not None
        stars = []
        for statement in statements(tree.body):
            if isinstance(statement, ast.ImportFrom):
                origin = self._origin(module, statement)
                for alias in statement.names:
                    if (alias.asname or alias.name) == name and (found := self._find(f"{origin}.{alias.name}", seen)):
                        return found
                    if alias.name == "*":
                        stars.append(origin)
            elif isinstance(statement, ast.Assign) and (lazy := _lazy(statement, name)):
                return self._find(f"{module}{lazy}", seen)
            elif name in _defined(statement):
                return Definition(self, module, statement)
        if self.tree(f"{module}.{name}") is not None:
            return Definition(self, f"{module}.{name}", None)
        return next((found for origin in stars if (found := self._find(f"{origin}.{name}", seen))), None)

    def _origin(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        folder = self.root.joinpath(*module.split(".")).is_dir()
        parts = module.split(".")
        parts = parts[: len(parts) - statement.level + folder]
        return ".".join([*parts, *([statement.module] if statement.module else [])])

    # -- classes

    def resolve(self, where: Definition, expression: ast.expr) -> Definition | None:
        """Resolve the name of a base class in a module."""
        if isinstance(expression, ast.Subscript):  # Generic[...], Optional[...]
            expression = expression.value
        name = ast.unparse(expression)
        return self.find(f"{where.module}.{name}") if name.replace(".", "").isidentifier() else None

    def bases(self, where: Definition) -> Iterator[Definition]:
        """A class and its base classes with available source, nearest first."""
        assert isinstance(where.node, ast.ClassDef)
        yield where
        for base in where.node.bases:
            found = self.resolve(where, base)
            if found is not None and isinstance(found.node, ast.ClassDef):
                yield from self.bases(found)

    def member(self, where: Definition, name: str) -> Definition | None:
        """A method, property, field or attribute of a class or of its base classes."""
        own = {f"self.{name}", f"self.__dict__['{name}']"}
        for one in self.bases(where):
            assert isinstance(one.node, ast.ClassDef)
            for statement in statements(one.node.body):
                if name in _defined(statement):
                    return Definition(self, one.module, statement)
            for node in ast.walk(one.node):
                if isinstance(node, ast.Assign | ast.AnnAssign) and own & _targets(node):
                    return Definition(self, one.module, node)
        return None

    def fields(self, where: Definition) -> list[Parameter]:
        """The fields of a dataclass, a struct or a model, as parameters of its constructor."""
        found: dict[str, Parameter] = {}
        for one in reversed(list(self.bases(where))):
            assert isinstance(one.node, ast.ClassDef)
            for statement in one.node.body:
                if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                    continue
                annotation, value = ast.unparse(statement.annotation), statement.value
                if "ClassVar" in annotation or ("NotRequired" in annotation and value is None):
                    if "NotRequired" in annotation:
                        found[statement.target.id] = _parameter(statement.target.id, default=True)
                    continue
                if isinstance(value, ast.Call) and "init=False" in ast.unparse(value):
                    continue
                found[statement.target.id] = _parameter(statement.target.id, default=value is not None)
        # A parameter after one with a default needs one, too. Only the number of positional parameters is checked.
        return sorted(found.values(), key=lambda one: one.default is DEFAULT)


def signature(found: Definition, bound: bool = False) -> Signature | None:
    """Parameters of a function or class; None if the source does not show them.

    ``bound``: without the first parameter, as a method of an object.
    """
    node, package = found.node, found.package
    if isinstance(node, ast.ClassDef):
        constructor = package.member(found, "__init__")
        if constructor is not None and isinstance(constructor.node, ast.FunctionDef):
            return signature(constructor, bound=True)
        fields = package.fields(found)
        return Signature(fields) if fields else None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    decorators = {ast.unparse(one) for one in node.decorator_list}
    parameters = list(_parameters(node.args))
    if "classmethod" in decorators or (bound and "staticmethod" not in decorators):
        parameters = parameters[1:]
    return Signature(parameters)


def _parameters(arguments: ast.arguments) -> Iterator[Parameter]:
    positional = [*arguments.posonlyargs, *arguments.args]
    without_default = len(positional) - len(arguments.defaults)
    for index, one in enumerate(positional):
        only = index < len(arguments.posonlyargs)
        kind = Parameter.POSITIONAL_ONLY if only else Parameter.POSITIONAL_OR_KEYWORD
        yield Parameter(one.arg, kind, default=DEFAULT if index >= without_default else Parameter.empty)
    if arguments.vararg:
        yield Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL)
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield Parameter(one.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else DEFAULT)
    if arguments.kwarg:
        yield Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD)


def _parameter(name: str, default: bool) -> Parameter:
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=DEFAULT if default else Parameter.empty)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class, including those in its conditions, without overloads."""
    for statement in body:
        if isinstance(statement, PART_OF):
            for name in ("body", "handlers", "orelse", "finalbody"):
                for part in getattr(statement, name, []):
                    yield from statements(part.body if isinstance(part, ast.ExceptHandler) else [part])
        elif not (
            isinstance(statement, ast.FunctionDef)
            and any(ast.unparse(one).endswith("overload") for one in statement.decorator_list)
        ):
            yield statement


def _defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {statement.name}
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return _targets(statement)
    if isinstance(statement, ast.Import):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    return set()


def _targets(statement: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return {
        ast.unparse(part) for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])
    }


def _lazy(statement: ast.Assign, name: str) -> str | None:
    """The entry of a name in a module's table of lazy imports, as ``.module.name``."""
    if isinstance(statement.value, ast.Dict):
        for key, value in zip(statement.value.keys, statement.value.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant):
                place = str(value.value)
                if place.startswith(".") and ":" in place:
                    return place.replace(":", ".")
    return None
