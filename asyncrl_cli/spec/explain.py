"""What pydantic found, said in plain words, with the key that was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import takewhile
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from asyncrl_cli.spec.catalogue import Key, general, keys
from asyncrl_cli.spec.problems import Problem

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
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_ELSEWHERE = {
    "lr": "learning_rate",
    "num_generations": "group_size",
    "rollout_n": "group_size",
    "max_completion_length": "max_response_tokens",
    "max_tokens": "max_response_tokens",
    "max_steps": "steps",
    "total_steps": "steps",
    "train_batch_size": "groups_per_step",
    "kl_beta": "kl_coef",
    "beta": "kl_coef",
    "epsilon": "clip_low",
    "epsilon_low": "clip_low",
    "epsilon_high": "clip_high",
    "clip_ratio_low": "clip_low",
    "clip_ratio_high": "clip_high",
    "clip_ratio_c": "dual_clip",
    "adv_estimator": "advantage",
    "loss_type": "loss",
    "loss_agg_mode": "aggregation",
    "importance_cap": "cap",
    "lam": "gae_lambda",
    "ppo_epochs": "epochs",
    "num_iterations": "epochs",
    "num_minibatches": "minibatches",
    "max_grad": "max_grad_norm",
    "max_model_len": "max_length",
    "model_name_or_path": "path",
}
"""What other trainers call some of our keys."""


def explain(error: ValidationError, *, partial: bool = False) -> Iterator[tuple[Problem, bool]]:
    """Each of pydantic's errors as a problem, and whether it is the key (rather than the value) that is wrong.

    Of a ``partial`` spec, of which a file could not be read, nothing is called missing.
    """
    details = error.errors(include_url=False)
    meant: set[str] = set()
    for detail in details:
        if detail["type"] == "extra_forbidden":
            parent, key = tuple(map(str, detail["loc"][:-1])), str(detail["loc"][-1])
            suggestions = suggest(".".join(parent), key)
            meant.update(suggestions[:1])
            yield Problem(_dotted(detail["loc"]), "there is no such key", _unknown_mend(parent, suggestions)), True
    for detail in details:
        path = _dotted(detail["loc"])
        if detail["type"] == "missing" and isinstance(detail["loc"][-1], str):
            if not partial and general(path) not in meant:
                yield Problem(path, "is missing", _missing_mend(path)), True
        elif detail["type"] == "missing":
            yield Problem(_dotted(detail["loc"][:-1]), f"has too few values: {_shown(detail['input'])}"), False
        elif detail["type"] not in ("extra_forbidden", "default_factory_not_called"):
            yield Problem(path, _message(detail), _mend(detail, keys().get(general(path)))), False


def suggest(parent: str, key: str) -> list[str]:
    """The dotted keys that an unknown ``key`` under ``parent`` may have been meant to be, likeliest first."""
    parent = general(parent)
    prefix = f"{parent}." if parent else ""
    beside = {path.removeprefix(prefix): path for path in keys() if path.startswith(prefix)}
    siblings = [name for name in beside if "." not in name]
    if not parent:
        siblings.append(beside.setdefault("extends", "extends"))
    close = get_close_matches(key.lower(), siblings, n=1, cutoff=0.75)
    if close:
        return [beside[close[0]]]

    def distance(path: str) -> tuple[int, int]:
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(parent.split("."), path.split("."), strict=False))
        return -len(list(shared)), path.count(".")

    names = {path: path.rpartition(".")[2] for path in keys()}
    wanted = [key.lower(), _ELSEWHERE.get(key.lower(), key)]
    exact = [path for path, name in names.items() if name in wanted]
    if not exact:
        near = get_close_matches(key.lower(), set(names.values()), n=2, cutoff=0.8)
        exact = [path for path, name in names.items() if name in near]
    return sorted(exact, key=distance)[:3]


def _unknown_mend(parent: tuple[str, ...], suggestions: list[str]) -> str:
    if suggestions:
        return f"Did you mean {_choice(suggestions)}?"
    prefix = ".".join((*filter(None, [general(".".join(parent))]), ""))
    siblings = [path.removeprefix(prefix) for path in keys() if path.startswith(prefix)]
    return f"Keys here: {', '.join(name for name in siblings if '.' not in name)}."


def _missing_mend(path: str) -> str:
    key = keys()[general(path)]
    return f"Add `{path.rpartition('.')[2]}`. {key.field.description}"


def _message(detail: ErrorDetails) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "too_long":
        return f"has {context['actual_length']} values, but takes {context['max_length']}"
    if kind == "string_too_long":
        return f"has {len(value)} characters, but may have {context['max_length']} at most"
    if kind == "string_pattern_mismatch":
        return f"{_shown(value)} does not fit the pattern {context['pattern']}"
    if kind == "literal_error":
        return f"must be {_choice(_allowed(detail))}, not {_shown(value)}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"must be {words} {context[name]:g}, not {_shown(value)}"
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}, not {_shown(value)}"
    return detail["msg"]


def _mend(detail: ErrorDetails, key: Key | None) -> str:
    value = detail["input"]
    if detail["type"] == "literal_error" and isinstance(value, str):
        close = get_close_matches(value.lower(), _allowed(detail), n=1, cutoff=0.6)
        if close:
            return f"Did you mean `{close[0]}`?"
    if detail["type"] == "string_type" and value is not None:
        return "Put it in quotes to make it text."
    if isinstance(value, str) and detail["type"] in ("int_type", "float_type", "bool_type"):
        return "Write it without quotes." if _is_bare(value) else _default_mend(key)
    if value is None and detail["type"] == "model_type":
        return "Put keys under it, or remove the line."
    return _default_mend(key)


def _default_mend(key: Key | None) -> str:
    if key is None:
        return ""
    if key.opens:
        return f"Its keys: {', '.join(key.opens.model_fields)}."
    default = key.default
    return "" if default is PydanticUndefined or default == {} else f"Left out, it is {_shown(default)}."


def _allowed(detail: ErrorDetails) -> list[str]:
    return [word.strip("'") for word in re.split(", | or ", detail["ctx"]["expected"])]


def _is_bare(text: str) -> bool:
    return text in ("true", "false") or bool(re.fullmatch(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", text))


def _choice(words: list[str]) -> str:
    quoted = [f"`{word}`" for word in words]
    return " or ".join(part for part in (", ".join(quoted[:-1]), quoted[-1]) if part)


def _dotted(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location))


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]" if len(value) < 5 else "a list"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    text = text if len(text) <= 60 else text[:59] + "…"
    return text if isinstance(value, (int, float)) else repr(text)
