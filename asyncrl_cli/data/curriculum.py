"""Stages of difficulty: which rows the prompts come from, and for how long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.arrow_table import ArrowPrompts
from asyncrl_cli.data.loader import Stage
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import CurriculumSpec

PLACE = "data.curriculum"


def stages_of(prompts: Sequence[Prompt], spec: CurriculumSpec | None) -> tuple[Stage, ...]:
    """The stages of a curriculum over these prompts.

    Raises ``DataError`` for a row without difficulty, and for a stage that no row is in.
    """
    if spec is None:
        return ()
    difficulties = _difficulties(prompts, spec.field)
    stages = []
    drawn = 0
    for number, stage in enumerate(spec.stages):
        low = -math.inf if stage.min is None else stage.min
        high = math.inf if stage.max is None else stage.max
        rows = [row for row, difficulty in enumerate(difficulties) if low <= difficulty <= high]
        if not rows:
            raise DataError(
                f"no training prompt has a `{spec.field}` from {low:g} to {high:g}",
                location=f"{PLACE}.stages.{number}",
                hint=f"the prompts' go from {min(difficulties):g} to {max(difficulties):g}",
            )
        stages.append(Stage(rows, None if stage.until_prompt is None else stage.until_prompt - drawn))
        drawn = stage.until_prompt or drawn
    return tuple(stages)


def _difficulties(prompts: Sequence[Prompt], field: str) -> list[float]:
    lazily = prompts.field(field) if isinstance(prompts, ArrowPrompts) else (p.fields.get(field) for p in prompts)
    found = []
    for row, value in enumerate(lazily):
        number = _number(value)
        if number is None:
            said = "no" if value is None else f"{value!r} as"
            raise DataError(
                f"the training prompt {prompts[row].uid!r} has {said} `{field}`",
                location=PLACE,
                hint="name a field with a number in every row",
            )
        found.append(number)
    return found


def _number(value: Any) -> float | None:
    """Also of a text, as a CSV file has nothing else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
