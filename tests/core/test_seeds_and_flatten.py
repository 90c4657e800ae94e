"""Seeds and fractions have the values of earlier runs, which replays need."""

from __future__ import annotations

import pytest

from asyncrl_cli.core.flatten import flatten
from asyncrl_cli.core.seeds import derive_fraction, derive_seed


@pytest.mark.parametrize(
    ("parts", "seed"),
    [
        ((0, 0, 0), 759540517790923586),
        ((7, 12, 3), 8937335386234627850),
        ((7, "attempt", 2), 3570648516707982466),
        ((123456789012345, "call", 4), 3346146549847376067),
        ((99, 512), 1871419684119615842),
    ],
)
def test_seeds_equal_the_seeds_of_earlier_runs(parts: tuple[object, ...], seed: int) -> None:
    assert derive_seed(*parts) == seed


def test_fractions_equal_the_fractions_of_earlier_runs() -> None:
    assert derive_fraction(0, 3, "p-é") == 0.8957032434599882
    assert derive_fraction(1, 0, "u") == 0.38608927416377736


def test_flatten() -> None:
    value = {"a": {"b": 1, "c": {}}, "d": [1, 2], "e": [{"f": 3}, {"f": None}], "g": []}
    others = {"a.b": 1, "a.c": {}, "d": [1, 2], "g": []}
    assert flatten(value) == others | {"e": value["e"]}
    assert flatten(value, index_lists=True) == others | {"e.0.f": 3, "e.1.f": None}
