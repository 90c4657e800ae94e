"""Convert rollouts to rows of the journal, and rows back to rollouts and batches.

Arrays are raw little-endian bytes. Each row that is read is checked against its CRC; a wrong CRC raises
``sqlite3.DatabaseError``, which ``schema.explained`` turns into a ``JournalError``.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from asyncrl_cli.records.experts import Experts, from_bytes, to_bytes
from asyncrl_cli.records.generation import (
    FinishReason,
    Rollout,
    Segment,
    TokenSequence,
    branch_id,
    group_and_index,
    training_rollout_id,
)
from asyncrl_cli.records.groups import Candidate, Group
from asyncrl_cli.records.images import Image, PlacedImage
from asyncrl_cli.records.prompt import Prompt, image_digests, prompt_from
from asyncrl_cli.records.rewards import Scored, Turn
from asyncrl_cli.records.training import MOST_VISITS, TrainingBatch, TrainingGroup

PROMPT = -1
"""Marks rows that belong to the prompt: as ``start`` in ``experts``, as ``rollout_index`` in ``image_places``."""
REQUEST_COLUMNS = (
    "request, engine, begun_at, ended_at, ending, tokens, context_tokens, cached_tokens, running_from, running_until"
)
"""The columns of ``engine_requests``, in the order of ``EngineRequest``."""
TOKENS, LOGPROBS = np.dtype("<i4"), np.dtype("<f4")


class RolloutRow(NamedTuple):
    """The columns of a rollout, in the order of ``_ROLLOUT_COLUMNS``."""

    tokens: int
    finish_reason: str | None
    reward: float | None
    failure: str | None
    metrics: str | None
    masked: int
    """1 if the task cannot score the rollout."""
    turns: str | None
    oldest: int | None
    newest: int | None
    recorded_at: float

    @property
    def judged(self) -> bool:
        """True if the task has returned a reward, or None."""
        return self.reward is not None or bool(self.masked)

    def decoded_metrics(self) -> dict[str, float]:
        """Decode ``metrics``."""
        metrics: dict[str, float] = json.loads(self.metrics) if self.metrics else {}
        return metrics

    def rewarded_turns(self) -> tuple[Turn, ...]:
        """Decode ``turns``."""
        return tuple(Turn(*turn) for turn in json.loads(self.turns)) if self.turns else ()


_ROLLOUT_COLUMNS = ", ".join(RolloutRow._fields)


def reduced_key(step: int) -> str:
    """Return the key in ``meta`` of ``TrainingBatch.tokens_per_microbatch``."""
    return f"tokens_per_microbatch/{step}"


def read_batch(connection: sqlite3.Connection, step: int, earlier: bool = False) -> TrainingBatch:
    """Read a step's batch as it was taken. Raises ``LookupError`` if there is none or its tokens are pruned, and
    ``sqlite3.DatabaseError`` for damage.

    ``earlier``: fill in ``TrainingGroup.earlier``; groups have one rollout. Texts stay empty: training needs none.
    """
    batch = connection.execute("SELECT version FROM batches WHERE step = ?", (step,)).fetchone()
    if batch is None:
        raise LookupError(f"step {step} has no batch")
    (text,) = connection.execute("SELECT value FROM meta WHERE key = 'settings'").fetchone()
    settings = json.loads(text)
    ids = [row[0] for row in connection.execute("SELECT id FROM groups WHERE step = ? ORDER BY id", (step,))]
    if len(ids) != settings["groups_per_step"]:
        raise _malformed(f"the batch of step {step} has {len(ids)} groups")
    size = settings["group_size"]
    image_cache: dict[str, Image] = {}  # one object for each image, even if several groups have it
    groups = [
        _training_group(connection, step=step, group_id=group_id, size=size, image_cache=image_cache)
        for group_id in ids
    ]
    if earlier:
        results = {uid: _earlier_results(connection, uid, step) for uid in {group.uid for group in groups}}
        groups = [replace(group, earlier=results[group.uid]) for group in groups]
    tokens = connection.execute("SELECT value FROM meta WHERE key = ?", (reduced_key(step),)).fetchone()
    return TrainingBatch(step, batch[0], tuple(groups), tokens_per_microbatch=json.loads(tokens[0]) if tokens else None)


def _earlier_results(connection: sqlite3.Connection, uid: str, step: int) -> tuple[Scored, ...]:
    """Read ``TrainingGroup.earlier`` for a prompt's group in the batch of ``step``.

    Only earlier batches count. They are committed before this batch is taken, and their results are never pruned, so
    a resume and a replay read the same results.
    """
    # Order by id, as the index by uid does: then the query stops at its limit.
    rows = connection.execute(
        f"SELECT group_id, r.crc, {_ROLLOUT_COLUMNS} FROM groups g JOIN rollouts r ON group_id = g.id "
        "WHERE g.uid = ? AND g.step < ? ORDER BY g.id DESC LIMIT ?",
        (uid, step, MOST_VISITS),
    )
    checked_rows = (_checked(group_id, index=0, crc=crc, columns=columns) for group_id, crc, *columns in rows)
    return tuple(Scored(row.reward, row.decoded_metrics()) for row in checked_rows)


def _training_group(
    connection: sqlite3.Connection, step: int, group_id: int, size: int, image_cache: dict[str, Image]
) -> TrainingGroup:
    group = read_group(connection, group_id, image_cache)
    rows = read_rollouts(connection, group_id)
    rewards = tuple(row.reward for row in rows.values() if row.judged)
    if len(rewards) != size or len(rows) != size:
        raise _malformed(f"group {group_id} has {len(rewards)} of its {size} rewards")
    tokens = read_tokens(connection, group_id, image_cache)
    lacks_tokens = any(row.tokens and index not in tokens.segments for index, row in rows.items())
    if lacks_tokens and _is_pruned(connection, group_id):
        raise LookupError(f"the tokens of step {step} are pruned")
    metrics = tuple(row.decoded_metrics() for row in rows.values())
    turns = tuple(row.rewarded_turns() for row in rows.values())
    return TrainingGroup(
        group_id,
        group.prompt.uid,
        group.version,
        rollouts=tuple(_rollout(group, index=index, row=row, tokens=tokens) for index, row in rows.items()),
        rewards=rewards,
        metrics=metrics if any(metrics) else (),
        turns=turns if any(turns) else (),
    )


def _is_pruned(connection: sqlite3.Connection, group_id: int) -> bool:
    (pruned_to,) = connection.execute("SELECT value FROM meta WHERE key = 'pruned_to'").fetchone()
    return group_id < int(pruned_to)


def read_group(connection: sqlite3.Connection, group_id: int, image_cache: dict[str, Image] | None = None) -> Group:
    """Read a group and its prompt, without its rollouts and pruned images; ``image_cache``: images read earlier.

    Raises ``sqlite3.DatabaseError`` if the group is damaged or missing.
    """
    row = connection.execute(
        "SELECT uid, prompt, fields, prompt_ids, version, serial, epoch, position, crc FROM groups WHERE id = ?",
        (group_id,),
    ).fetchone()
    if row is None:
        raise _malformed(f"group {group_id} is missing")
    *columns, crc = row
    if crc is not None and row_crc(group_id, *columns) != crc:
        raise _malformed(f"the prompt of group {group_id} has a wrong checksum")
    uid, content, fields, prompt_ids, version, *_ = columns
    ids = tuple(np.frombuffer(prompt_ids, TOKENS).tolist())
    prompt = prompt_from({"uid": uid, "content": json.loads(content), "fields": json.loads(fields)})
    images: tuple[PlacedImage, ...] = ()
    if digests := image_digests(prompt.content):
        images = read_images(connection, group_id, image_cache, prompt=True).get((PROMPT, 0), ())
        if (images or not _is_pruned(connection, group_id)) and [image.image.digest for image in images] != digests:
            raise _malformed(f"the images of group {group_id} differ from its prompt's images")
        prompt = replace(prompt, images=tuple(image.image for image in images))
    return Group(group_id, version=version, prompt=prompt, prompt_ids=ids, images=images if ids else ())


def read_images(
    connection: sqlite3.Connection, group_id: int, image_cache: dict[str, Image] | None = None, prompt: bool = False
) -> dict[tuple[int, int], tuple[PlacedImage, ...]]:
    """Read the images of a group's rollouts by index and branch, or its ``prompt``'s images. Raises
    ``sqlite3.DatabaseError`` for damage."""
    image_cache = {} if image_cache is None else image_cache
    images: dict[tuple[int, int], tuple[PlacedImage, ...]] = {}
    for *columns, crc in connection.execute(
        "SELECT rollout_index, branch, number, start, length, digest, crc FROM image_places WHERE group_id = ? "
        f"AND rollout_index {'=' if prompt else '>'} {PROMPT} ORDER BY rollout_index, branch, number",
        (group_id,),
    ):
        index, branch, _, start, length, digest = columns
        if row_crc(group_id, *columns) != crc:
            raise _malformed(f"the place of an image of group {group_id} has a wrong checksum")
        if digest not in image_cache:
            row = connection.execute("SELECT data FROM images WHERE digest = ?", (digest,)).fetchone()
            if row is None or (image := Image.from_bytes(row[0])).digest != digest:
                raise _malformed(f"the image {digest} of group {group_id} is missing, or has wrong bytes")
            image_cache[digest] = image
        images[index, branch] = (*images.get((index, branch), ()), PlacedImage(image_cache[digest], start, length))
    return images


def read_rollouts(connection: sqlite3.Connection, group_id: int) -> dict[int, RolloutRow]:
    """Read a group's rollouts without their tokens, by index. Raises ``sqlite3.DatabaseError`` for damage."""
    rollouts = {}
    for index, crc, *columns in connection.execute(
        f"SELECT rollout_index, crc, {_ROLLOUT_COLUMNS} FROM rollouts WHERE group_id = ? ORDER BY rollout_index",
        (group_id,),
    ):
        rollouts[index] = _checked(group_id, index=index, crc=crc, columns=columns)
    return rollouts


class RolloutOutcome(NamedTuple):
    """The state of a rollout's group with its reason, and the rollout's score; None without a score."""

    group_state: str
    reason: str
    score: Scored | None


def rollout_outcome(connection: sqlite3.Connection, rollout_id: str) -> RolloutOutcome | None:
    """Read how a rollout has ended; None if there is no such group. Raises ``sqlite3.DatabaseError`` for damage."""
    group_id, index = group_and_index(rollout_id)
    group = connection.execute("SELECT state, reason FROM groups WHERE id = ?", (group_id,)).fetchone()
    if group is None:
        return None
    row = read_rollouts(connection, group_id).get(index)
    score = Scored(row.reward, row.decoded_metrics()) if row is not None and row.judged else None
    group_state, reason = group
    return RolloutOutcome(group_state, reason, score)


def _checked(group_id: int, index: int, crc: int | None, columns: Sequence[Any]) -> RolloutRow:
    if crc is not None and row_crc(group_id, index, *columns[:-1]) != crc:
        raise _malformed(f"rollout {training_rollout_id(group_id, index)} has a wrong checksum")
    return RolloutRow(*columns)


def open_groups(connection: sqlite3.Connection) -> tuple[Group, ...]:
    """Read the running groups in admission order. Raises ``sqlite3.DatabaseError`` for damage."""
    rows = connection.execute(  # the first condition is the partial index's, which SQLite must see to use it
        "SELECT id FROM groups WHERE state IN ('running', 'finished') AND state = 'running' ORDER BY id"
    ).fetchall()
    return tuple(_with_rollouts(connection, read_group(connection, group_id)) for (group_id,) in rows)


def _with_rollouts(connection: sqlite3.Connection, group: Group) -> Group:
    tokens = read_tokens(connection, group.group_id)
    scored: set[int] = set()
    unscored: dict[int, Rollout] = {}
    prefixes: dict[int, dict[int, tuple[Segment, ...]]] = {}
    for index, row in read_rollouts(connection, group.group_id).items():
        if row.judged:
            scored.add(index)
        elif row.finish_reason is not None:
            unscored[index] = _rollout(group, index=index, row=row, tokens=tokens)
        else:
            prefixes[index] = tokens.segments.get(index, {})
            joined(prefixes[index], training_rollout_id(group.group_id, index), row.tokens)  # only to check them
    return replace(group, scored=frozenset(scored), unscored=unscored, prefixes=prefixes)


def _rollout(group: Group, index: int, row: RolloutRow, tokens: GroupTokens) -> Rollout:
    """A finished rollout with its branches. The branches get the rollout's finish reason, because theirs are not
    recorded, and texts stay empty. Raises ``sqlite3.DatabaseError`` for damage."""
    rollout_id = training_rollout_id(group.group_id, index)
    sequences = joined(tokens.segments.get(index, {}), rollout_id, row.tokens)
    root, *branches = (
        Rollout(
            *sequences.get(branch, TokenSequence.context()).arrays,
            rollout_id=branch_id(rollout_id, branch),
            prompt_ids=group.prompt_ids,
            text="",
            finish_reason=cast("FinishReason", row.finish_reason),
            images=(*group.images, *tokens.images.get((index, branch), ())),
        )
        for branch in sorted({0, *sequences})
    )
    of_prompt = tokens.experts.get((index, 0, PROMPT))
    prompt_experts = None if of_prompt is None else from_bytes(of_prompt, len(group.prompt_ids))
    return replace(root, branches=tuple(branches), prompt_experts=prompt_experts)


class GroupTokens(NamedTuple):
    """The recorded tokens of a group."""

    segments: dict[int, dict[int, tuple[Segment, ...]]]
    """By the rollout's index and branch."""
    experts: dict[tuple[int, int, int], bytes]
    """By index, branch and ``start`` (``PROMPT`` for the rollout's prompt)."""
    images: dict[tuple[int, int], tuple[PlacedImage, ...]]
    """Images after the prompt, by index and branch."""


def read_tokens(
    connection: sqlite3.Connection, group_id: int, image_cache: dict[str, Image] | None = None
) -> GroupTokens:
    """Read a group's recorded tokens. Raises ``sqlite3.DatabaseError`` for damage.

    Three queries read all rollouts together, because a batch has thousands of rollouts.
    """
    experts = {}
    for index, branch, start, experts_bytes, crc in connection.execute(
        "SELECT rollout_index, branch, start, ids, crc FROM experts WHERE group_id = ?", (group_id,)
    ):
        if row_crc(group_id, index, branch, start, experts_bytes) != crc:
            raise _malformed(f"the experts of rollout {training_rollout_id(group_id, index)} have a wrong checksum")
        experts[index, branch, start] = experts_bytes
    listed: dict[int, dict[int, list[Segment]]] = {}
    for index, branch, start, version, tokens, logprobs, crc, keyed in connection.execute(
        "SELECT rollout_index, branch, start, version, tokens, logprobs, crc, key_crc FROM segments "
        "WHERE group_id = ? ORDER BY rollout_index, branch, start",
        (group_id,),
    ):
        name = training_rollout_id(group_id, index)
        key = (group_id, index, branch, start, version)
        if _crc(tokens, logprobs) != crc or (keyed is not None and key_crc(*key, crc) != keyed):
            raise _malformed(f"the tokens of rollout {name} have a wrong checksum")
        ids, values = np.frombuffer(tokens, TOKENS), np.frombuffer(logprobs, LOGPROBS)
        experts_bytes = experts.get((index, branch, start))
        segment = Segment(
            branch_id(name, branch),
            start=start,
            version=version,
            ids=ids,
            logprobs=values,
            experts=None if experts_bytes is None else from_bytes(experts_bytes, len(ids)),
        )
        listed.setdefault(index, {}).setdefault(branch, []).append(segment)
    segments = {
        index: {branch: tuple(branch_segments) for branch, branch_segments in branches.items()}
        for index, branches in listed.items()
    }
    return GroupTokens(segments, experts, read_images(connection, group_id, image_cache))


def experts_columns(
    group_id: int, index: int, branch: int, start: int, experts: Experts
) -> tuple[int, int, int, int, bytes, int]:
    """The columns of a row in ``experts``."""
    columns = group_id, index, branch, start, to_bytes(experts)
    return *columns, row_crc(*columns)


def joined(
    branches: Mapping[int, Sequence[Segment]], rollout_id: str = "", tokens: int | None = None
) -> dict[int, TokenSequence]:
    """Join segments to sequences, by branch. Raises ``sqlite3.DatabaseError`` for gaps, for versions that fall, and if
    the number of sampled tokens is not ``tokens``."""
    try:
        sequences = {branch: TokenSequence.join(segments) for branch, segments in branches.items()}
    except ValueError as error:
        raise _malformed(str(error)) from error
    token_count = sum(int(sequence.sampled.sum()) for sequence in sequences.values())
    if tokens is not None and token_count != tokens:
        raise _malformed(f"rollout {rollout_id} has {token_count} of its {tokens} tokens")
    return sequences


def columns_of(segment: Segment) -> tuple[int, int, bytes, bytes, int]:
    """The columns ``start``, ``version``, ``tokens``, ``logprobs`` and ``crc``."""
    tokens = segment.ids.astype(TOKENS, copy=False).tobytes()
    logprobs = segment.logprobs.astype(LOGPROBS, copy=False).tobytes()
    return segment.start, segment.version, tokens, logprobs, _crc(tokens, logprobs)


def prompt_columns(candidate: Candidate) -> dict[str, Any]:
    """A group's columns that hold its prompt."""
    content, fields = prompt_texts(candidate.prompt)
    ids = np.asarray(candidate.prompt_ids, TOKENS).tobytes()
    return {"uid": candidate.prompt.uid, "prompt": content, "fields": fields, "prompt_ids": ids}


def prompt_texts(prompt: Prompt) -> tuple[str, str]:
    """The columns ``prompt`` and ``fields``."""
    return json.dumps(prompt.content), json.dumps(dict(prompt.fields))


def row_crc(*values: Any) -> int:
    """The CRC-32 of some columns in the form of ``ascii``, which is faster than JSON and as exact.

    It is the same before and after a value is stored, although SQLite drops the sign of zero and converts types.
    """
    return zlib.crc32(ascii([_as_stored(value) for value in values]).encode())


def _as_stored(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) + 0.0
    if isinstance(value, int):
        return int(value)
    return zlib.crc32(value) if isinstance(value, bytes) else value if value is None else str(value)


def key_crc(group_id: int, index: int, branch: int, start: int, version: int, crc: int) -> int:
    """The CRC-32 of a segment's key, its version, and the ``crc`` of its tokens."""
    return zlib.crc32(b"%d,%d,%d,%d,%d,%d" % (group_id, index, branch, start, version, crc))


def _crc(tokens: bytes, logprobs: bytes) -> int:
    return zlib.crc32(logprobs, zlib.crc32(tokens))


def _malformed(problem: str) -> sqlite3.DatabaseError:
    return sqlite3.DatabaseError(f"malformed: {problem}")
