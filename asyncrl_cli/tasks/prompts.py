"""Where a split's prompts come from: its source if it names one, else the task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from asyncrl_cli.data.errors import DataError
from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.data.sources import read_source
from asyncrl_cli.spec.sections import SplitSpec
from asyncrl_cli.tasks.base import PromptTask, Split, Task


def load_prompts(
    split_name: Split, split_spec: SplitSpec, task: Task, base: Path = Path(), place: str = ""
) -> Sequence[Prompt]:
    """The prompts of one split.

    Relative paths and modules are looked for in ``base``; ``place`` is the key of the spec that errors name,
    ``data.<split>`` if not said. Raises ``DataError`` if there is neither file nor task to make the prompts, or the
    task is not told how many.
    """
    place = place or f"data.{split_name}"
    if split_spec.path is not None:
        return read_source(split_spec, split_name, base)
    if not isinstance(task, PromptTask):
        raise DataError(
            f"{place} has no path, and the task makes no prompts of its own",
            mend=f"set {place}.path to a file or data set, or give the task a method prompts(split, size)",
        )
    if split_spec.size is None:
        raise DataError(f"{place}.size is not given", mend="say how many prompts the task shall make")
    prompts = task.prompts(split_name, split_spec.size)
    if prompts:
        _check_fields(prompts[0], place)
    return prompts


def _check_fields(prompt: Prompt, place: str) -> None:
    """Checkpoints keep prompts as JSON: better refused now than at the first checkpoint."""
    try:
        json.dumps(dict(prompt.fields))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the fields of prompt {prompt.uid!r} are not JSON values: {error}",
            place=place,
            mend="let the task's prompts carry text, numbers, booleans, lists and mappings only",
        ) from None
