"""JSON values as in JavaScript: every number is a double, and a number that no double can hold is null."""

from __future__ import annotations

import json
import math
from typing import Any

from asyncrl_cli.records.prompt import ChatError

JsonObject = dict[str, Any]
"""An object of a request or an answer, in the format of its API."""


def finite(text: str) -> Any:
    """Parse JSON; NaN and infinite numbers become null.

    The parser itself replaces them, because a recursive walk would fail at a smaller depth than the parser.
    """
    return json.loads(text, parse_constant=lambda _: None, parse_float=_finite)


def canonical_json(value: Any) -> str:
    """A text that is equal for equal JSON values: 1 equals 1.0, and 0.0 equals -0.0.

    Raises ``ChatError`` for values that JSON lacks.
    """
    try:
        text = json.dumps(value, sort_keys=True, ensure_ascii=False)
        doubles = json.loads(text, parse_int=_double, parse_float=_double, parse_constant=lambda _: None)
        return json.dumps(doubles, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"not JSON: {error}") from error


def _finite(digits: str) -> float | None:
    double = float(digits)
    return double if math.isfinite(double) else None


def _double(digits: str) -> float | None:
    double = _finite(digits)
    return None if double is None else double + 0.0  # no -0.0
