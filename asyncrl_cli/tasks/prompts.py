"""Where a split's prompts come from: its source if it names one, else the task."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.rows import RowForm
from asyncrl_cli.data.sources import read_source
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import SplitSpec
from asyncrl_cli.tasks.base import CheckingTask, PromptTask, Split, Task

LOOK_S = 3.0
"""Seconds in which rows are checked that are made when they are asked for."""


def load_prompts(
    split_name: Split, split_spec: SplitSpec, task: Task, base: Path = Path(), location: str = ""
) -> Sequence[Prompt]:
    """The prompts of one split.

    Relative paths and modules are looked for in ``base``; ``location`` is the key of the spec that errors name,
    ``data.<split>`` if not said. Raises ``DataError`` if there is neither file nor task to make the prompts, or the
    task is not told how many.
    """
    location = location or f"data.{split_name}"
    check = task.check_prompt if isinstance(task, CheckingTask) else None
    if split_spec.path is not None:
        prompts = read_source(split_spec, split_name, base, check)
        if not isinstance(prompts, list):  # a list has been read row by row
            _look_at(prompts)
        return prompts
    if not isinstance(task, PromptTask):
        raise DataError(
            f"{location} has no path, and the task makes no prompts of its own",
            hint=f"set {location}.path to a file or data set, or give the task a method prompts(split, size)",
        )
    if split_spec.size is None:
        raise DataError(f"{location}.size is not given", hint="say how many prompts the task shall make")
    prompts = task.prompts(split_name, split_spec.size)
    form = RowForm(check=check)
    for number, prompt in enumerate(_look_at(prompts), start=1):
        form.checked(prompt, f"{location}:{number}")
    return prompts


def _look_at(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompts of a split that makes them when they are asked for: as many as there is time for.

    Raises ``DataError`` for one that is none. Those that come later are looked at when they are trained on.
    """
    until = time.monotonic() + LOOK_S
    looked_at: list[Prompt] = []
    for prompt in prompts:
        looked_at.append(prompt)
        if time.monotonic() > until:
            break
    return looked_at
