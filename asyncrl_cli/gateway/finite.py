"""JSON without the numbers that JSON does not have."""

from __future__ import annotations

import json
import math
from typing import Any


def finite(text: str) -> Any:
    """The value of a JSON text; a number that no double holds is null, as JavaScript writes it.

    The parser does all of it: a walk through the value would end at a smaller depth than the parser does.
    """
    return json.loads(text, parse_constant=lambda _: None, parse_float=_finite)


def _finite(number: str) -> float | None:
    value = float(number)
    return value if math.isfinite(value) else None
