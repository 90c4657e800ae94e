"""Held-out answers and pass@k, from the files of evaluations.

Unreadable lines of a file are skipped: a killed run leaves half a line, and a report of the others is still useful.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl_cli.inspect.decoding import content_text
from asyncrl_cli.records.training import CORRECT

PROMPTS_PER_KIND = 3
CHARACTERS_SHOWN = 1500
"""Largest number of characters of a held-out response."""


class EvaluationFile(NamedTuple):
    """The first line of an evaluation's file. ``pass_at``: pass@1, pass@2, …; empty with one sample per prompt."""

    step: int
    kind: str
    path: Path
    pass_at: tuple[float, ...]


class HeldOutAnswer(NamedTuple):
    step: int
    text: str
    is_correct: bool


class HeldOutPrompt(NamedTuple):
    """A held-out prompt with its answers before and after training."""

    prompt: str
    reference: str
    answers: tuple[HeldOutAnswer, HeldOutAnswer]


def evaluation_files(run_folder: Path) -> list[EvaluationFile]:
    """Read the first lines of all evaluations, by step."""
    files = []
    for path in run_folder.glob("evaluations/*.jsonl"):
        for head in islice(file_rows(path), 1):
            try:
                pass_at = tuple(map(float, head.get("pass_at") or ()))
                files.append(EvaluationFile(int(head["step"]), str(head["kind"]), path, pass_at))
            except (KeyError, OverflowError, TypeError, ValueError):
                continue
    return sorted(files)


def several_samples(files: Sequence[EvaluationFile]) -> list[EvaluationFile]:
    """Return the files with pass@k for more than one k."""
    return [file for file in files if file.kind == "sampled" and len(file.pass_at) > 1]


def held_out_prompts(files: Sequence[EvaluationFile]) -> list[HeldOutPrompt]:
    """Choose prompts with a reward in the first and the last greedy evaluation: some newly answered right in the last
    one, then some wrong there. Empty for fewer than two greedy evaluations."""
    greedy = [file for file in files if file.kind == "greedy"]
    if len(greedy) < 2:
        return []
    # Failed and masked responses have no reward: they are not wrong.
    first_rows, last_rows = (
        {str(row.get("uid")): row for row in islice(file_rows(file.path), 1, None) if row.get("reward") is not None}
        for file in (greedy[0], greedy[-1])
    )
    learned: list[HeldOutPrompt] = []
    wrong: list[HeldOutPrompt] = []
    for uid, row in last_rows.items():
        if uid not in first_rows:
            continue
        answers = _answer(first_rows[uid], greedy[0].step), _answer(row, greedy[-1].step)
        selection = learned if answers[1].is_correct else wrong
        if len(selection) < PROMPTS_PER_KIND and not all(answer.is_correct for answer in answers):
            reference = str(row.get("answer", ""))[:CHARACTERS_SHOWN]
            selection.append(HeldOutPrompt(content_text(row.get("prompt", "")), reference, answers))
    return [*learned, *wrong]


def _answer(row: dict[str, Any], step: int) -> HeldOutAnswer:
    reward = row["reward"]
    is_correct = isinstance(reward, int | float) and reward >= CORRECT
    return HeldOutAnswer(step, str(row.get("response", ""))[:CHARACTERS_SHOWN], is_correct)


def file_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a file's lines; none if it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(row, dict):
                    yield row
    except OSError:
        return
