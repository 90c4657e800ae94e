"""Sample rollouts: the best, worst, stalest and longest, with their tokens."""

from __future__ import annotations

import base64
import io
import sqlite3
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

from asyncrl_cli.inspect.decoding import Decoder, TokenShown, content_text, reference_text, tokens_of
from asyncrl_cli.journal.queries import group_record
from asyncrl_cli.journal.rollouts import Extreme, extreme_rollouts, trained_steps
from asyncrl_cli.records.generation import training_rollout_id
from asyncrl_cli.records.images import Image

SAMPLES_PER_KIND = 3
"""Number of rollouts of a kind, each from another third of the run."""
SEARCHED_ROWS = 600
"""Rows read per sample, to find a rollout of a group that is not shown yet."""
TOKENS_SHOWN = 600
IMAGES_SHOWN = 4
IMAGE_SIDE = 240
"""Longer side of an image in pixels. Smaller images keep their size."""

KINDS: tuple[Extreme, ...] = get_args(Extreme)


@dataclass(frozen=True, slots=True)
class Sample:
    """The first sequence of a rollout, the number of its tokens that are ``left_out``, and ``images`` of prompt and
    rollout as data URLs. Steps count from 1."""

    kind: str
    rollout_id: str
    prompt: str
    reference: str
    reward: float
    tokens: int
    staleness: int
    step: int
    shown_tokens: tuple[TokenShown, ...]
    left_out: int
    images: tuple[str, ...]


def samples(connection: sqlite3.Connection, decoder: Decoder | None) -> list[Sample]:
    """Choose up to ``SAMPLES_PER_KIND`` rollouts of each kind, from different groups and parts of the run."""
    if (steps := trained_steps(connection)) is None:
        return []
    first_step, last_step = steps
    step_count = last_step - first_step + 1
    part_count = min(SAMPLES_PER_KIND, step_count)
    borders = [first_step + step_count * index // part_count for index in range(part_count + 1)]
    shown_groups: set[int] = set()
    run_samples = []
    for extreme in KINDS:
        for begin, end in reversed(list(pairwise(borders))):
            rows = extreme_rollouts(connection, extreme, range(begin, end), SEARCHED_ROWS)
            row = next((row for row in rows if row.group_id not in shown_groups), None)
            if row is None:
                continue
            shown_groups.add(row.group_id)
            group = group_record(connection, row.group_id)
            name = training_rollout_id(row.group_id, row.rollout_index)
            rollout = next(rollout for rollout in group.rollouts if rollout.rollout_id == name)
            shown_tokens, left_out = tokens_of(rollout, decoder, TOKENS_SHOWN)
            images = [*group.prompt.images, *(image.image for image in rollout.images)]
            run_samples.append(
                Sample(
                    kind=extreme,
                    rollout_id=name,
                    prompt=content_text(group.prompt.content),
                    reference=reference_text(group.prompt.fields),
                    reward=row.reward,
                    tokens=rollout.tokens,
                    staleness=row.staleness,
                    step=row.step + 1,
                    shown_tokens=shown_tokens,
                    left_out=left_out,
                    images=tuple(map(_data_url, images[:IMAGES_SHOWN])),
                )
            )
    return run_samples


def _data_url(image: Image) -> str:
    """A small copy. Encoding it again keeps bytes of untrusted image files out of the report."""
    thumbnail = image.decoded().copy()
    thumbnail.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
    file = io.BytesIO()
    thumbnail.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
