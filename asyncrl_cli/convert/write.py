"""Writes a converted configuration as a spec, with a comment for every key of the source."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from asyncrl_cli.convert.rows import Conversion, Setting
from asyncrl_cli.convert.source import shown
from asyncrl_cli.core.secrets import hide
from asyncrl_cli.core.terminal import printable
from asyncrl_cli.spec.data_sources import names_a_file
from asyncrl_cli.spec.keys import general, keys
from asyncrl_cli.spec.load import looks_like_path

WIDTH = 116
CHECK = "CHECK"
"""The mark of comments that need a decision."""
PATHS = ("model.path", "data.train.path", "data.eval.path")


def spec_text(conversion: Conversion, origin: str, folder: Path) -> str:
    """Return the text of a converted spec.

    ``origin`` names the converted configuration. ``folder`` is the spec's folder, where its relative paths start; in
    the source they start in the current folder.
    """
    trainer = conversion.trainer.name
    lines = [
        f"# Converted by `asyncrl convert {trainer.lower()}` from {_line(origin)}.",
        f"# Each comment names the keys of {trainer} that decided a value; `{CHECK}` marks points to check. Values",
        f"# without a comment are {trainer}'s defaults and asyncrl's.",
    ]
    tree: dict[str, Any] = {}
    for setting in sorted(conversion.settings, key=_position):
        *sections, name = setting.key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = setting
    lines += _section(tree, trainer=trainer, folder=folder, indent="")
    lines += _footer(conversion, trainer)
    return printable(hide("\n".join(lines))) + "\n"


def _position(setting: Setting) -> int:
    parts = setting.key.split(".")
    known = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((_order()[name] for name in known if name in _order()), len(_order()))


@cache
def _order() -> dict[str, int]:
    return {name: position for position, name in enumerate(keys())}


def _section(tree: dict[str, Any], trainer: str, folder: Path, indent: str) -> Iterator[str]:
    for name, inner in tree.items():
        if isinstance(inner, dict):
            yield from [""] * (not indent)
            yield f"{indent}{name}:"
            yield from _section(inner, trainer=trainer, folder=folder, indent=f"{indent}  ")
            continue
        source = ", ".join(f"{key} = {shown(value)}" for key, value in inner.sources.items())
        if source or not _is_default(inner):
            text = source or f"{trainer}'s default"
            yield from _comment(f"{text}; {inner.note}" if inner.note else text, indent)
        for remark in inner.remarks:
            yield from _comment(f"{CHECK} {name}: {remark}", indent)
        if inner.value is not None:
            value = _from_folder(inner.key, inner.value, folder) if inner.key in PATHS else inner.value
            yield f"{indent}{name}: {_value(value)}"


def _is_default(setting: Setting) -> bool:
    key = keys().get(general(setting.key))
    return key is not None and setting.value in (key.default, str(key.default))


def _value(value: Any) -> str:
    unicode = printable(str(value)) == str(value)  # Unprintable characters are written as escapes.
    style = '"' if isinstance(value, str) and (not unicode or "\n" in value) else None
    text = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=10**6, allow_unicode=unicode)
    return text.removesuffix("...\n").strip()


def _from_folder(key: str, path: Any, folder: Path) -> Any:
    """Make a path, or each path of a list, relative to ``folder`` instead of the current folder. Hub ids stay."""
    if isinstance(path, list):
        return [_from_folder(key, one, folder) for one in path]
    path = str(path)
    is_path = looks_like_path(path, os.path.abspath(path)) if key == "model.path" else names_a_file(path)
    if not is_path or path.startswith(("/", "~", "$")) or folder.resolve() == Path.cwd():
        return path
    return os.path.relpath(path, folder)


def _footer(conversion: Conversion, trainer: str) -> Iterator[str]:
    given = conversion.source.given
    if conversion.lost:
        yield from ("", f"# {CHECK}: no counterpart. This spec does not have the effect of these keys of {trainer}.")
        for note, names in conversion.lost.items():
            yield from _comment(note, "")
            yield from (f"#     {name} = {_line(shown(given[name]))}" for name in sorted(names))
    if conversion.unknown:
        yield from ("", f"# {CHECK}: unknown keys. Nothing was converted from them.")
        yield from (f"#     {name} = {_line(shown(given[name]))}" for name in sorted(conversion.unknown))
    if conversion.needless:
        yield from ("", "# No counterpart, and none needed.")
        for note, names in conversion.needless.items():
            yield from _comment(note, "")
            yield from _list(names)
    if conversion.unused:
        yield from ("", f"# Without effect: switched off in {trainer}, or meaningless with the values above.")
        yield from _list(conversion.unused)


def _list(names: Iterable[str]) -> Iterator[str]:
    wrapped = textwrap.wrap(", ".join(sorted(names)), WIDTH - 6, break_long_words=False, break_on_hyphens=False)
    yield from (f"#     {line}" for line in wrapped)


def _comment(text: str, indent: str) -> Iterator[str]:
    """A comment. Its first line is wrapped; further lines are code and stay unchanged."""
    first, *code = text.split("\n")
    wrapped = textwrap.wrap(_line(first), WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    yield from (f"{indent}# {line}" for line in wrapped)
    yield from (f"{indent}# {_line(line)}".rstrip() for line in code)


def _line(text: str) -> str:
    """The text without line breaks, including breaks that only YAML knows."""
    return re.sub(r"[\r\n\x85\u2028\u2029]+", " ", text)
