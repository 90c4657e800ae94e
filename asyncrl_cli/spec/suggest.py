"""Which key was meant by one that there is not."""

from __future__ import annotations

from difflib import get_close_matches
from itertools import takewhile

from asyncrl_cli.spec.keys import general, keys
from asyncrl_cli.spec.other_trainers import NAMES


def suggest(parent: str, key: str) -> list[str]:
    """The dotted keys that an unknown ``key`` under ``parent`` may have been meant to be, likeliest first.

    What another trainer calls a key comes before a likeness of letters, unless it lies in another section and the
    likeness in this one.
    """
    parent = general(parent)
    prefix = f"{parent}." if parent else ""
    beside = {path.removeprefix(prefix): path for path in keys() if path.startswith(prefix)}
    siblings = [name for name in beside if "." not in name]
    if not parent:
        siblings.append(beside.setdefault("extends", "extends"))
    close = get_close_matches(key.lower(), siblings, n=1, cutoff=0.75)
    answer = elsewhere(parent, key)
    known = [] if answer.endswith(".") else answer.split()
    own = [path for path in _suffixes(parent, key) if "." in path and path in keys()]
    if own:
        return own[:1]
    if close and not any(_shared(parent, path) for path in known) and (parent or not known):
        return [beside[close[0]]]
    names = {path: path.rpartition(".")[2] for path in keys()}
    wanted = {names[path] for path in known}
    closer = max((_shared(parent, path) for path in known), default=-1)
    found = known + [path for path in names if names[path] in wanted and _shared(parent, path) > closer]
    found += [path for path in names if names[path] == key.lower() and path not in found]
    if not found:
        near = get_close_matches(key.lower(), set(names.values()), n=2, cutoff=0.8)
        found = [path for path, name in names.items() if name in near]

    def rank(path: str) -> tuple[int, int, int]:
        return -_shared(parent, path), known.index(path) if path in known else len(known), path.count(".")

    return sorted(found, key=rank)[: max(3, len(known))]


def elsewhere(parent: str, key: str) -> str:
    """What ``NAMES`` says of a key, under the longest part of its path that is there; empty when none is."""
    return next((NAMES[name] for name in _suffixes(parent, key) if name in NAMES), "")


def _suffixes(parent: str, key: str) -> list[str]:
    """The path of a key, then without its first section, and so on."""
    parts = [*filter(None, parent.lower().split(".")), key.lower()]
    return [".".join(parts[start:]) for start in range(len(parts))]


def _shared(parent: str, path: str) -> int:
    """How many sections a path has in common with the location of the unknown key."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(parent.split("."), path.split("."), strict=False))))
