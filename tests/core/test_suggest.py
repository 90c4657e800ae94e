"""Suggestions for an unknown name."""

from __future__ import annotations

import pytest

from asyncrl_cli.core.suggest import closest, did_you_mean
from asyncrl_cli.spec.algorithm import PRESETS


@pytest.mark.parametrize(
    ("word", "meant"), [("gpro", "grpo"), ("GPSO", "gspo"), ("gsp", "gspo"), ("dapoo", "dapo"), ("rlo", "rloo")]
)
def test_swapped_and_missing_letters_are_recognized(word: str, meant: str) -> None:
    assert closest(word, PRESETS) == [meant]
    assert did_you_mean(word, PRESETS) == f"did you mean `{meant}`?"


def test_dissimilar_names_are_not_suggested() -> None:
    assert closest("xyzzy", PRESETS) == closest("grpo", []) == []
    assert did_you_mean("xyzzy", PRESETS, "use one of them") == "use one of them"
