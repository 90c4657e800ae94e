"""Values arrive unchanged in the other process, and invalid ones are refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.sandbox.exchange import Codec, update

pytestmark = pytest.mark.slow

CODEC = Codec()
NUMBERS = st.integers() | st.floats(allow_nan=False) | st.decimals(allow_nan=False)
HASHABLE = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(HASHABLE, inner, max_size=4),
    max_leaves=20,
)
KINDS = (
    "list",
    "dict",
    "set",
    "bytes",
    "int",
    "new",
    "type",
    "named",
    "array",
    "raised",
    "builtins.slice",
    "ValueError",
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(KINDS),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=20,
)


@given(VALUES)
def test_values_arrive_as_they_were(value: Any) -> None:
    arrived = CODEC.decode(json.loads(json.dumps(CODEC.encode(value))))
    assert (arrived, type(arrived)) == (value, type(value))


@given(JSON)
def test_invalid_values_are_refused(data: Any) -> None:
    try:
        value = CODEC.decode(data)
    except Exception:
        return
    CODEC.encode(value)  # it is made of plain values only: anything else would raise


@given(st.lists(VALUES, max_size=4), st.lists(VALUES, max_size=4))
def test_a_list_is_updated_in_place(old: list[Any], new: list[Any]) -> None:
    held = copy.deepcopy(old)
    assert update(held, copy.deepcopy(new)) is held
    assert held == new
