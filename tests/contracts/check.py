"""Checks whether one use of a library fits a release of it."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from inspect import Signature
from typing import Any

from tests.contracts.source import Package, signature
from tests.contracts.uses import Use


def problem(use: Use, package: Package, installed: bool) -> str | None:
    """Return the fault of a use; None if it fits.

    ``installed``: the library is also imported, to inspect names that its source does not show (compiled modules).
    """
    before, *members = use.target.split("().")
    found = package.find(before)
    if found is None:
        return _imported_problem(use) if installed else f"there is no {before}"
    accepts = None if members else signature(found)
    for index, names in enumerate(members):
        name, *further = names.split(".")
        assert isinstance(found.node, ast.ClassDef), f"{before} is not a class, but asyncrl uses it as one: {use}"
        member = package.member(found, name)
        if member is None:
            return None if package.inherits_unknown(found, name) else f"{before} has no {name}"
        if further or index < len(members) - 1:
            return None  # a member of an object that objects.py does not list
        accepts = signature(member, bound=True)
    return _refusal(use, accepts)


def _refusal(use: Use, accepts: Signature | None) -> str | None:
    if not use.call or accepts is None:
        return None
    bind = accepts.bind_partial if use.more else accepts.bind
    try:
        bind(*[None] * use.positional, **dict.fromkeys(use.keywords))
    except TypeError as error:
        return f"{use.target} does not take this call: {error}; it has {accepts}"
    return None


def _imported_problem(use: Use) -> str | None:
    """The same check by import, for compiled modules."""
    found: Any = None
    names = use.target.replace("()", "").split(".")
    for index, name in enumerate(names):
        owner = found
        if index and hasattr(owner, name):
            found = getattr(owner, name)
        else:
            try:
                found = import_module(".".join(names[: index + 1]))
            except ImportError:
                return f"{'.'.join(names[:index])} has no {name}"
    try:
        accepts = inspect.signature(found)
    except (TypeError, ValueError):  # compiled code
        return None
    if "()." in use.target and inspect.isroutine(found):
        accepts = accepts.replace(parameters=list(accepts.parameters.values())[1:])
    return _refusal(use, accepts)
