"""Load the prompts of a split, from its source or from the task, and decide which prompts are held out."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from pathlib import Path

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.rows import CollectedPrompts, RowForm
from asyncrl_cli.data.rows import LazyPrompts as LazyPrompts  # tasks of users import it from here
from asyncrl_cli.data.sources import read_source
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import SplitSpec
from asyncrl_cli.tasks.base import CheckingTask, PromptTask, Split, Task

CHECK_S = 1.0
"""Seconds for checking rows that are made on access, after the first row."""
HELD_OUT_ONE_IN = 10
"""By default, one text in this many is held out."""


def is_held_out(text: str, folds: int = HELD_OUT_ONE_IN) -> bool:
    """True if prompts with this text belong to the ``eval`` split; one text in ``folds`` does.

    Invariant: a hash of the text alone decides, not the seed, the row or the size of a split. So a prompt that is drawn
    in two rows is never both trained on and evaluated.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % folds == 0


def load_prompts(
    split_name: Split, split_spec: SplitSpec, task: Task, base: Path = Path(), location: str = ""
) -> Sequence[Prompt]:
    """Load the prompts of one split.

    ``base``: folder for relative paths and modules. ``location``: the spec's key for errors, by default
    ``data.<split>``. Raises ``DataError`` if neither a file nor the task makes the prompts, or if their number is
    missing.
    """
    location = location or f"data.{split_name}"
    check = task.check_prompt if isinstance(task, CheckingTask) else None
    if split_spec.path is not None:
        prompts = read_source(split_spec, split_name, base, check=check)
        if not isinstance(prompts, CollectedPrompts):  # these were checked row by row when they were read
            _check_first(prompts)
        return prompts
    if not isinstance(task, PromptTask):
        raise DataError(
            f"{location} has no path, and the task makes no prompts",
            hint=f"set {location}.path to a file or data set, or give the task a method prompts(split, size)",
        )
    if split_spec.size is None:
        raise DataError(f"{location}.size is missing", hint="set it to the number of prompts that the task should make")
    prompts = task.prompts(split_name, split_spec.size)
    form = RowForm(location, check=check)
    for row_index, prompt in enumerate(_check_first(prompts), start=1):
        form.checked(prompt, row_index)
    return prompts


def _check_first(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Check the first prompts of a split that makes them on access, as many as there is time for; return them.

    Raises ``DataError`` for an invalid prompt. Later prompts are checked when they are trained on.
    """
    deadline = math.inf
    checked: list[Prompt] = []
    for prompt in prompts:
        checked.append(prompt)
        if time.monotonic() > deadline:
            break
        deadline = min(deadline, time.monotonic() + CHECK_S)  # from here: making the first may import a library
    return checked
