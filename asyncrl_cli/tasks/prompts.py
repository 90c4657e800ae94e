"""Where a split's prompts come from: its file if it names one, else the task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from asyncrl_cli.data.errors import DataError
from asyncrl_cli.data.jsonl import read_jsonl
from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.spec.sections import SplitSpec
from asyncrl_cli.tasks.base import PromptTask, Split, Task


def load_prompts(split_name: Split, split_spec: SplitSpec, task: Task, base: Path = Path()) -> Sequence[Prompt]:
    """The prompts of one split.

    A relative path is looked for in ``base``. Raises ``DataError`` if there is neither file nor task to make
    them, or the task is not told how many.
    """
    if split_spec.path is not None:
        return read_jsonl(base / Path(split_spec.path).expanduser(), split_spec.size)
    if not isinstance(task, PromptTask):
        raise DataError(
            f"data.{split_name} has no path, and the task makes no prompts of its own",
            mend=f"set data.{split_name}.path to a JSON Lines file, or give the task a method prompts(split, size)",
        )
    if split_spec.size is None:
        raise DataError(f"data.{split_name}.size is not given", mend="say how many prompts the task shall make")
    prompts = task.prompts(split_name, split_spec.size)
    if prompts:
        _check_fields(prompts[0], split_name)
    return prompts


def _check_fields(prompt: Prompt, split_name: Split) -> None:
    """Checkpoints keep prompts as JSON: better refused now than at the first checkpoint."""
    try:
        json.dumps(dict(prompt.fields))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the fields of prompt {prompt.uid!r} are not JSON values: {error}",
            place=f"data.{split_name}",
            mend="let the task's prompts carry text, numbers, booleans, lists and mappings only",
        ) from None
