"""JSON values as JavaScript has them: every number is a double, and one that no double holds is null."""

from __future__ import annotations

import json
import math
from typing import Any

from asyncrl_cli.records.prompt import ChatError


def finite(text: str) -> Any:
    """The value of a JSON text, without the numbers that JSON does not have.

    The parser does all of it: a walk through the value would end at a smaller depth than the parser does.
    """
    return json.loads(text, parse_constant=lambda _: None, parse_float=_finite)


def key(value: Any) -> str:
    """A text that is equal for equal JSON values: 1 and 1.0 are equal, and so are 0.0 and -0.0.

    Raises ``ChatError`` for what is not JSON.
    """
    try:
        text = json.dumps(value, sort_keys=True, ensure_ascii=False)
        doubles = json.loads(text, parse_int=_double, parse_float=_double, parse_constant=lambda _: None)
        return json.dumps(doubles, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"not JSON: {error}") from error


def _finite(number: str) -> float | None:
    double = float(number)
    return double if math.isfinite(double) else None


def _double(number: str) -> float | None:
    double = _finite(number)
    return None if double is None else double + 0.0  # no -0.0
