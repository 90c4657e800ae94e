"""Reads sample rollouts, and the files next to a journal: evaluations with their samples, and the machine's load.

Unreadable lines of a file are skipped: a killed run leaves half a line, and a report of the rest is still useful.
"""

from __future__ import annotations

import base64
import io
import json
import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, get_args

from asyncrl_cli.inspect.decoding import Decoder, TokenShown, content_text, reference_text, tokens_of
from asyncrl_cli.journal.queries import group_record
from asyncrl_cli.journal.rollout_rows import read_image
from asyncrl_cli.journal.rollouts import Extreme, extreme_rollouts, trained_steps
from asyncrl_cli.records.generation import training_rollout_id
from asyncrl_cli.records.images import Image
from asyncrl_cli.records.prompt import image_digests
from asyncrl_cli.records.training import CORRECT
from asyncrl_cli.runs.directory import RunDirectory

PROCESSOR, MEMORY = "Processor (share)", "Memory used (GB)"
GPU, GPU_MEMORY = "GPU (share)", "GPU memory used (GB)"
_SCALES = {
    "system/cpu_utilization_percentage": (PROCESSOR, 0.01),
    "system/system_memory_usage_megabytes": (MEMORY, 1e-3),
}
_OF_GPUS = {"utilization_percentage": (GPU, 0.01), "memory_usage_megabytes": (GPU_MEMORY, 1e-3)}
EACH = 3
"""Number of rollouts of a kind, each from another part of the run."""
LOOKED_AT = 50
"""Rows read per sample, to find a rollout of a group that is not shown yet."""
TOKENS_SHOWN = 600
HELD_OUT_EACH = 3
"""Number of held-out prompts of a kind."""
RESPONSE_SHOWN = 1500
"""Largest number of characters of a held-out response."""
IMAGES_SHOWN = 4
IMAGE_SIDE = 240
"""Longer side of an image in pixels. Smaller images keep their size."""

KINDS: tuple[Extreme, ...] = get_args(Extreme)


@dataclass(frozen=True, slots=True)
class EvaluationFile:
    """The first line of an evaluation's file. ``pass_at`` is empty with one sample per prompt."""

    path: Path
    kind: str
    step: int
    pass_at: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MachineSample:
    """The machine's load at the Unix time ``at``, by chart title. GPUs are averaged."""

    at: float
    values: Mapping[str, float]


def evaluation_files(run: RunDirectory) -> list[EvaluationFile]:
    """Read the first lines of all evaluations, by step."""
    found = []
    for path in run.path.glob("evaluations/*.jsonl"):
        for head in _rows(path, 1):
            try:
                numbers = tuple(float(value) for value in head.get("pass_at") or ())
                found.append(EvaluationFile(path, kind=str(head["kind"]), step=int(head["step"]), pass_at=numbers))
            except (KeyError, TypeError, ValueError):
                continue
    return sorted(found, key=lambda one: (one.step, one.kind))


def evaluation_samples(file: EvaluationFile) -> Iterator[Mapping[str, Any]]:
    rows = _rows(file.path)
    next(rows, None)
    return rows


def machine_samples(run: RunDirectory) -> list[MachineSample]:
    """Read all samples of the machine's load, oldest first."""
    found = []
    for row in _rows(run.path / "system.jsonl"):
        at = row.get("time")
        if isinstance(at, int | float) and (values := dict(_readings(row))):
            found.append(MachineSample(float(at), values))
    return found


def _readings(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    gpus: dict[str, list[float]] = {}
    for name, value in row.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            continue
        if name in _SCALES:
            title, scale = _SCALES[name]
            yield title, value * scale
        elif name.startswith("system/gpu_"):
            quantity = name.removeprefix("system/gpu_").partition("_")[2]  # after the GPU's number
            if quantity in _OF_GPUS:
                title, scale = _OF_GPUS[quantity]
                gpus.setdefault(title, []).append(value * scale)
    for title, values in gpus.items():
        yield title, math.fsum(values) / len(values)


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


def newest(files: Sequence[EvaluationFile], kind: str) -> tuple[EvaluationFile, EvaluationFile] | None:
    """Return the first and the last evaluation of a kind, or None for fewer than two."""
    of_kind = [one for one in files if one.kind == kind]
    return (of_kind[0], of_kind[-1]) if len(of_kind) > 1 else None


@dataclass(frozen=True, slots=True)
class Sample:
    """The first sequence of a rollout. Steps count from 1."""

    kind: str
    rollout_id: str
    uid: str
    prompt: str
    reference: str
    """The right answer from the prompt's fields, if they have it."""
    reward: float
    tokens: int
    staleness: int
    step: int
    shown: tuple[TokenShown, ...]
    left_out: int
    """Number of tokens that are not shown."""
    images: tuple[str, ...]
    """The first images of prompt and rollout, as data URLs."""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer to a held-out prompt after ``step`` steps."""

    step: int
    text: str
    correct: bool
    reward: float


@dataclass(frozen=True, slots=True)
class HeldOutSample:
    """A held-out prompt with the answers before and after training."""

    uid: str
    prompt: str
    reference: str
    before: Response
    after: Response
    images: tuple[str, ...]
    """The prompt's first images, as data URLs."""


def samples(connection: sqlite3.Connection, decoder: Decoder | None) -> list[Sample]:
    """Choose up to ``EACH`` rollouts of each kind, from different groups and different parts of the run."""
    if (steps := trained_steps(connection)) is None:
        return []
    first, last = steps
    parts = min(EACH, last - first + 1)
    borders = [first + (last - first + 1) * part // parts for part in range(parts + 1)]
    known: set[int] = set()
    found = []
    for kind in KINDS:
        for begin, end in reversed(list(pairwise(borders))):
            rows = extreme_rollouts(
                connection, extreme=kind, steps=range(begin, end), count=LOOKED_AT * EACH * len(KINDS)
            )
            row = next((row for row in rows if row.group_id not in known), None)
            if row is None:
                continue
            known.add(row.group_id)
            group = group_record(connection, row.group_id)
            name = training_rollout_id(row.group_id, row.rollout_index)
            rollout = next(one for one in group.rollouts if one.rollout_id == name)
            shown, left_out = tokens_of(rollout, decoder, TOKENS_SHOWN)
            images = [*group.prompt.images, *(placed.image for placed in rollout.images)]
            found.append(
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
    return found


def _data_url(image: Image) -> str:
    """A small copy. Encoding it again keeps bytes of untrusted image files out of the report."""
    small = image.decoded().copy()
    small.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
    written = io.BytesIO()
    small.save(written, "PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


def held_out_samples(
    connection: sqlite3.Connection, before: EvaluationFile, after: EvaluationFile
) -> list[HeldOutSample]:
    """Choose prompts with a reward in two evaluations: some newly answered right in the later one, some wrong there."""
    earlier = {str(row.get("uid")): row for row in evaluation_samples(before) if row.get("reward") is not None}
    wrong: list[HeldOutSample] = []
    learned: list[HeldOutSample] = []
    for row in evaluation_samples(after):
        uid = str(row.get("uid"))
        if uid not in earlier or row.get("reward") is None:  # failed and masked responses are not wrong
            continue
        one = HeldOutSample(
            uid=uid,
            prompt=content_text(row.get("prompt", "")),
            reference=str(row.get("answer", ""))[:RESPONSE_SHOWN],
            before=_response(earlier[uid], before.step),
            after=_response(row, after.step),
            images=_held_out_images(connection, row.get("prompt")),
        )
        if not one.after.correct and len(wrong) < HELD_OUT_EACH:
            wrong.append(one)
        if one.after.correct and not one.before.correct and len(learned) < HELD_OUT_EACH:
            learned.append(one)
        if len(wrong) == len(learned) == HELD_OUT_EACH:
            break
    return [*learned, *wrong]


def _held_out_images(connection: sqlite3.Connection, content: Any) -> tuple[str, ...]:
    try:
        digests = image_digests(content or "")
    except (AttributeError, KeyError, TypeError):  # a file may have anything there
        return ()
    found = (read_image(connection, digest) for digest in digests[:IMAGES_SHOWN])
    return tuple(_data_url(image) for image in found if image is not None)


def _response(row: Mapping[str, Any], step: int) -> Response:
    reward = row.get("reward")
    known = float(reward) if isinstance(reward, int | float) else 0.0
    return Response(step, text=str(row.get("response", ""))[:RESPONSE_SHOWN], correct=known >= CORRECT, reward=known)
