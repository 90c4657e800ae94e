"""Checks whether one use of a library fits a release of it."""

from __future__ import annotations

import ast
from inspect import Signature

from tests.contracts.source import Package, signature
from tests.contracts.uses import Use


def problem(use: Use, package: Package) -> str | None:
    """Return the fault of a use; None if it fits."""
    before, *members = use.target.split("().")
    found = package.find(before)
    if found is None:
        return f"there is no {before}"
    accepts = None if members else signature(found)
    for index, names in enumerate(members):
        name, *further = names.split(".")
        assert isinstance(found.node, ast.ClassDef), f"{before} is not a class, but asyncrl uses it as one: {use}"
        member = package.member(found, name)
        if member is None:
            return f"{before} has no {name}"
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
