"""Turns pydantic's errors into problems with plain messages, and suggests the key that was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from asyncrl_cli.core.secrets import hide
from asyncrl_cli.core.suggest import closest, did_you_mean
from asyncrl_cli.spec.keys import REMOVED, Key, general, keys
from asyncrl_cli.spec.problems import Problem

KeyPath = tuple[int | str, ...]
"""The keys and indices that lead to a value, in pydantic's form."""
_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
}
_MESSAGES = {
    "too_long": "must have {max_length} values, not {actual_length}",
    "too_short": "must have at least {min_length} item, not {actual_length}",
    "string_too_long": "must have at most {max_length} characters, not {length}",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must match {pattern}, not {shown}",
    "greater_than_equal": "must be at least {ge:.12g}, not {shown}",
    "greater_than": "must be more than {gt:.12g}, not {shown}",
    "less_than_equal": "must be at most {le:.12g}, not {shown}",
    "less_than": "must be less than {lt:.12g}, not {shown}",
}
_CONVERTIBLE = dict.fromkeys(("actor_rollout_ref", "async_training"), "verl")
_CONVERTIBLE |= dict.fromkeys(("model_name_or_path", "num_generations", "per_device_train_batch_size"), "trl")
"""Top-level keys that identify another trainer's complete configuration, which `asyncrl convert` can read."""
_SUGGESTED = 100
"""Largest number of unknown keys with a suggestion: each takes milliseconds, and a file may have thousands."""


def explain(error: ValidationError, *, partial: bool = False) -> Iterator[tuple[Problem, bool]]:
    """Translate pydantic's errors. Yields each problem, and True if the key (not the value) is wrong.

    In a ``partial`` spec (one of its files could not be read), no key is reported as missing.
    """
    details, words = _without_kinds(error.errors(include_url=False))
    meant: set[str] = set()
    unknown = [detail for detail in details if detail["type"] == "extra_forbidden"]
    trainer = next((_CONVERTIBLE[str(d["loc"][0])] for d in unknown if str(d["loc"][0]) in _CONVERTIBLE), "")
    convert = f"this looks like a configuration of another trainer: asyncrl convert {trainer} FILE"
    for count, detail in enumerate(unknown):
        suggestions, hint = _suggestions(detail["loc"]) if count < _SUGGESTED else ([], "")
        meant.update(suggestions[:1])
        is_section = trainer and isinstance(detail["input"], dict) and not suggestions
        yield Problem(_dotted(detail["loc"]), "unknown key", convert if is_section else hint), True
    for detail in details:
        path = _dotted(detail["loc"])
        if detail["type"] == "missing" and isinstance(detail["loc"][-1], str):
            if not partial and general(path) not in meant:
                yield Problem(path, "missing", convert if trainer and path == "task" else _missing_hint(path)), True
        elif detail["type"] == "missing":
            yield Problem(_dotted(detail["loc"][:-1]), f"too few values: {_display_text(detail['input'])}"), False
        elif detail["type"] not in ("extra_forbidden", "default_factory_not_called"):
            message = _message(detail, words.get(detail["loc"], ""))
            yield Problem(path, message, _hint(detail, keys().get(general(path)))), False


def _without_kinds(details: list[ErrorDetails]) -> tuple[list[ErrorDetails], dict[KeyPath, str]]:
    """Merge the errors of keys that take either a word or another type.

    Pydantic reports an error for each alternative, with the type in its location. Returns the errors of the other type,
    located at the key itself, and the valid words, by location.
    """
    key_details: list[ErrorDetails] = []
    words: dict[KeyPath, str] = {}
    for detail in details:
        location = detail["loc"]
        leaf = next((end for end in range(1, len(location)) if _is_leaf(location[:end])), len(location))
        key = location[:leaf] + tuple(step for step in location[leaf:] if isinstance(step, int))
        if key != location and detail["type"] == "literal_error":
            words[key] = _choice(_allowed_words(detail))
        else:
            detail["loc"] = key
            key_details.append(detail)
    return key_details, words


def _is_leaf(location: KeyPath) -> bool:
    key = keys().get(general(_dotted(location)))
    return key is not None and key.opens is None


def _suggestions(location: KeyPath) -> tuple[list[str], str]:
    parent, key = _dotted(location[:-1]), str(location[-1])
    if removed := REMOVED.get(general(_dotted(location))):
        return [], removed
    if suggestions := suggest(parent, key):
        return suggestions, f"did you mean {_choice(suggestions)}?"
    prefix = ".".join((*filter(None, [general(parent)]), ""))
    siblings = [path.removeprefix(prefix) for path in keys() if path.startswith(prefix)]
    return [], f"keys here: {', '.join(name for name in siblings if '.' not in name)}"


def _missing_hint(path: str) -> str:
    key = keys()[general(path)]
    if key.field.examples:
        return f"add it, such as `{key.name}: {_flow(key.field.examples[0])}`"
    return f"add `{key.name}`: {key.description[:1].lower()}{key.description[1:].removesuffix('.')}"


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow(inner)}' for key, inner in value.items())}}}"
    return f"[{', '.join(map(_flow, value))}]" if isinstance(value, list) else str(value)


def _message(detail: ErrorDetails, words: str = "") -> str:
    """``words``: further valid values."""
    error_type, value = detail["type"], detail["input"]
    if error_type in _MESSAGES:
        return _MESSAGES[error_type].format(**detail.get("ctx", {}), shown=_display_text(value), length=len(str(value)))
    if error_type == "format":
        return f"{detail['msg']}, not {_display_text(value)}"
    if error_type in ("literal_error", "named"):
        return f"must be {_choice(_allowed_words(detail))}, not {_display_text(value)}"
    if error_type in _KINDS:
        return f"must be {f'{words} or ' if words else ''}{_KINDS[error_type]}, not {_display_text(value)}"
    return detail["msg"]


def _hint(detail: ErrorDetails, key: Key | None) -> str:
    value = detail["input"]
    is_word = detail["type"] in ("literal_error", "named") and isinstance(value, str)
    if is_word and (hint := did_you_mean(value, _allowed_words(detail))):
        return hint
    if detail["loc"] == ("evaluation",) and value in (False, "off"):
        return "to evaluate nothing, set data.eval: null"
    if detail["type"] == "string_type" and isinstance(value, (bool, int, float)):
        return "put it in quotes"
    if isinstance(value, float) and value.is_integer() and detail["type"] in ("int_type", "int_from_float"):
        return f"write {int(value)}" if abs(value) < 2**63 else _default_hint(key)
    if isinstance(value, str) and detail["type"] in ("int_type", "float_type", "bool_type"):
        bare = value in ("true", "false") or re.fullmatch(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", value)
        return "write it without quotes" if bare else _default_hint(key)
    if key is not None and key.opens and detail["type"] in ("list_type", "dict_type"):
        fields = ", ".join(key.opens.model_fields)
        each = "write a list of mappings" if detail["type"] == "list_type" else "write names, each with a mapping"
        return f"{each} with the keys {fields}"
    return _default_hint(key)


def _default_hint(key: Key | None) -> str:
    if key is None:
        return ""
    default = key.default
    if key.opens and not isinstance(default, int):  # Of all sections, only rollout.engines may also be a number.
        return f"write its keys below it: {', '.join(key.opens.model_fields)}"
    return "" if default is PydanticUndefined or default == {} else f"default: {_display_text(default)}"


def _allowed_words(detail: ErrorDetails) -> list[str]:
    return [word.strip("'") for word in re.split(", | or ", detail["ctx"]["expected"])]


def _choice(words: list[str]) -> str:
    quoted = [f"`{word}`" for word in words]
    return " or ".join(phrase for phrase in (", ".join(quoted[:-1]), quoted[-1]) if phrase)


def _dotted(location: KeyPath) -> str:
    return ".".join(map(str, location))


def _display_text(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_display_text, value))}]" if len(value) < 5 else "a list"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = hide(str(value))
    text = text if len(text) <= 60 else text[:59] + "…"
    return text if isinstance(value, (int, float)) else repr(text)


def suggest(parent: str, key: str) -> list[str]:
    """Suggest dotted keys for an unknown ``key`` under ``parent``, the most likely first."""
    parent = general(parent)
    words = [*filter(None, parent.lower().split(".")), key.lower()]
    for start in range(len(words)):  # the key may have its path, or be in another section
        if (path := ".".join(words[start:])) in keys() and "." in path:
            return [path]
    prefix = f"{parent}." if parent else ""
    section_keys = {path.removeprefix(prefix): path for path in keys() if path.startswith(prefix)}
    if not parent:
        section_keys["extends"] = "extends"
    if close := closest(key, [name for name in section_keys if "." not in name], cutoff=0.75):
        return [section_keys[close[0]]]
    names = {path: path.rpartition(".")[2] for path in keys()}
    near = [key.lower()] if key.lower() in names.values() else closest(key, set(names.values()), count=2, cutoff=0.8)

    def rank(path: str) -> tuple[int, int]:
        sections = zip(parent.split("."), path.split("."), strict=False)
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], sections)))
        return -shared, path.count(".")

    return sorted((path for path, name in names.items() if name in near), key=rank)[:3]
