"""Reads sample rollouts, and the evaluations' files with their samples.

Unreadable lines of a file are skipped: a killed run leaves half a line, and a report of the rest is still useful.
"""

from __future__ import annotations

import base64
import io
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_args

from asyncrl_cli.inspect.decoding import Decoder, TokenShown, content_text, reference_text, tokens_of
from asyncrl_cli.journal.queries import group_record
from asyncrl_cli.journal.rollout_rows import read_image
from asyncrl_cli.journal.rollouts import Extreme, extreme_rollouts, trained_steps
from asyncrl_cli.records.generation import training_rollout_id
from asyncrl_cli.records.images import Image
from asyncrl_cli.records.prompt import image_digests
from asyncrl_cli.records.training import CORRECT
from asyncrl_cli.runs.directory import RunDirectory

EACH = 3
"""Number of rollouts of a kind, each from another third of the run; also the number of held-out prompts of a kind."""
SEARCHED_ROWS = 50
"""Rows read per sample, to find a rollout of a group that is not shown yet."""
TOKENS_SHOWN = 600
RESPONSE_SHOWN = 1500
"""Largest number of characters of a held-out response."""
IMAGES_SHOWN = 4
IMAGE_SIDE = 240
"""Longer side of an image in pixels. Smaller images keep their size."""

KINDS: tuple[Extreme, ...] = get_args(Extreme)


class EvaluationFile(NamedTuple):
    """The first line of an evaluation's file. ``pass_at`` is empty with one sample per prompt."""

    step: int
    kind: str
    path: Path
    pass_at: tuple[float, ...]


def evaluation_files(run: RunDirectory) -> list[EvaluationFile]:
    """Read the first lines of all evaluations, by step."""
    files = []
    for path in run.path.glob("evaluations/*.jsonl"):
        for head in _rows(path, 1):
            try:
                pass_at = tuple(float(value) for value in head.get("pass_at") or ())
                files.append(EvaluationFile(int(head["step"]), str(head["kind"]), path, pass_at))
            except (KeyError, TypeError, ValueError):
                continue
    return sorted(files)


def _rows(path: Path, most: int | None = None) -> Iterator[dict[str, Any]]:
    """The JSON objects in a file's first ``most`` lines."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in islice(lines, most):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(row, dict):
                    yield row
    except OSError:
        return


@dataclass(frozen=True, slots=True)
class Sample:
    """The first sequence of a rollout. Steps count from 1.

    Args:
        reference: the right answer from the prompt's fields, if they have it.
        left_out: number of tokens that are not shown.
        images: the first images of prompt and rollout, as data URLs.
    """

    kind: str
    rollout_id: str
    uid: str
    prompt: str
    reference: str
    reward: float
    tokens: int
    staleness: int
    step: int
    shown: tuple[TokenShown, ...]
    left_out: int
    images: tuple[str, ...]


class Response(NamedTuple):
    """An answer to a held-out prompt after ``step`` steps."""

    step: int
    text: str
    correct: bool


class HeldOutSample(NamedTuple):
    """A held-out prompt with the answers before and after training, and its first images as data URLs."""

    uid: str
    prompt: str
    reference: str
    before: Response
    after: Response
    images: tuple[str, ...]


def samples(connection: sqlite3.Connection, decoder: Decoder | None) -> list[Sample]:
    """Choose up to ``EACH`` rollouts of each kind, from different groups and different parts of the run."""
    if (steps := trained_steps(connection)) is None:
        return []
    first_step, last_step = steps
    step_count = last_step - first_step + 1
    part_count = min(EACH, step_count)
    borders = [first_step + step_count * part // part_count for part in range(part_count + 1)]
    shown_groups: set[int] = set()
    chosen = []
    for kind in KINDS:
        for begin, end in reversed(list(pairwise(borders))):
            rows = extreme_rollouts(connection, kind, range(begin, end), count=SEARCHED_ROWS * EACH * len(KINDS))
            row = next((row for row in rows if row.group_id not in shown_groups), None)
            if row is None:
                continue
            shown_groups.add(row.group_id)
            group = group_record(connection, row.group_id)
            name = training_rollout_id(row.group_id, row.rollout_index)
            rollout = next(rollout for rollout in group.rollouts if rollout.rollout_id == name)
            shown, left_out = tokens_of(rollout, decoder, TOKENS_SHOWN)
            images = [*group.prompt.images, *(placed.image for placed in rollout.images)]
            chosen.append(
                Sample(
                    kind=kind,
                    rollout_id=name,
                    uid=group.row.uid,
                    prompt=content_text(group.prompt.content),
                    reference=reference_text(group.prompt.fields),
                    reward=row.reward,
                    tokens=rollout.tokens,
                    staleness=row.staleness,
                    step=row.step + 1,
                    shown=shown,
                    left_out=left_out,
                    images=tuple(map(_data_url, images[:IMAGES_SHOWN])),
                )
            )
    return chosen


def _data_url(image: Image) -> str:
    """A small copy. Encoding it again keeps bytes of untrusted image files out of the report."""
    thumbnail = image.decoded().copy()
    thumbnail.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
    file = io.BytesIO()
    thumbnail.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def held_out_samples(connection: sqlite3.Connection, files: Sequence[EvaluationFile]) -> list[HeldOutSample]:
    """Choose prompts with a reward in the first and the last greedy evaluation: some newly answered right in the last
    one, some wrong there. Empty for fewer than two greedy evaluations."""
    greedy = [file for file in files if file.kind == "greedy"]
    if len(greedy) < 2:
        return []
    before, after = greedy[0], greedy[-1]
    # Failed and masked responses have no reward: they are not wrong.
    earlier, later = (
        {str(row.get("uid")): row for row in islice(_rows(file.path), 1, None) if row.get("reward") is not None}
        for file in (before, after)
    )
    wrong: list[HeldOutSample] = []
    learned: list[HeldOutSample] = []
    for uid, row in later.items():
        if uid not in earlier:
            continue
        sample = HeldOutSample(
            uid,
            prompt=content_text(row.get("prompt", "")),
            reference=str(row.get("answer", ""))[:RESPONSE_SHOWN],
            before=_response(earlier[uid], before.step),
            after=_response(row, after.step),
            images=_held_out_images(connection, row.get("prompt")),
        )
        if not sample.after.correct and len(wrong) < EACH:
            wrong.append(sample)
        if sample.after.correct and not sample.before.correct and len(learned) < EACH:
            learned.append(sample)
    return [*learned, *wrong]


def _held_out_images(connection: sqlite3.Connection, content: Any) -> tuple[str, ...]:
    try:
        digests = image_digests(content or "")
    except (AttributeError, KeyError, TypeError):  # a file may have anything there
        return ()
    images = (read_image(connection, digest) for digest in digests[:IMAGES_SHOWN])
    return tuple(_data_url(image) for image in images if image is not None)


def _response(row: Mapping[str, Any], step: int) -> Response:
    reward = row.get("reward")
    is_correct = isinstance(reward, int | float) and reward >= CORRECT
    return Response(step, str(row.get("response", ""))[:RESPONSE_SHOWN], is_correct)
