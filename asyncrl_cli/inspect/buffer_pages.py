"""The pages of `asyncrl inspect buffer`: the entire buffer, a list of groups, one group, one rollout."""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from asyncrl_cli.core.errors import RunArgumentError
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.inspect.decoding import Decoder, message_text, open_decoder
from asyncrl_cli.inspect.pages import WIDTH, Page, cell, duration, number, paragraph, record_table, table
from asyncrl_cli.journal.progress import progress
from asyncrl_cli.journal.queries import (
    GroupRecord,
    GroupState,
    RolloutRecord,
    group_record,
    list_groups,
    overview,
)
from asyncrl_cli.records.generation import CONTEXT, Segment, group_and_index, sequence_of
from asyncrl_cli.records.images import PlacedImage
from asyncrl_cli.runs.directory import RunDirectory

DUE_ROWS = 12
"""Largest number of admission versions with their own row; the oldest versions come first."""
UID_WIDTH = 20
TOKEN_MARGIN = "    |"
CONTEXT_MARGIN = "  > "
"""The margin of context, which is text that the policy did not sample."""
ENDS = {None: "no end yet", "stop": "ended by the model", "length": "truncated at rollout.max_response_tokens"}
"""Meanings of finish reasons."""
EPISODE_PROMPT = "of an episode: see the context of its rollouts"
Value = TypeVar("Value")


# -- the entire buffer


def overview_page(run: RunDirectory, connection: sqlite3.Connection) -> Page:
    """Show counts, ages and deadlines."""
    buffer = overview(connection)
    document = asdict(buffer)
    document |= {"run": run.run_id, "phase": run.status, **document.pop("progress")}
    settings = buffer.progress.settings
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(buffer.rejected.items()))
    states = [
        (
            count.state,
            f"{count.groups:,}",
            _cell(count.rollouts, "{:,}".format),
            _cell(count.tokens, "{:,}".format),
            _cell(count.age_s, duration),
            _cell(count.oldest_s, duration),
            reasons if count.state == "rejected" else "",
        )
        for count in buffer.states
    ]
    header = ("groups", "count", "ended rollouts", "tokens", "median age", "oldest", "")
    lines = [
        f"run      {run.run_id}, {run.status}",
        f"progress {buffer.progress.step} of {settings.total_steps} batches taken, "
        f"weight version {buffer.progress.version}",
        f"bound    at most {counted(settings.max_staleness, 'version')} (on_stale: {settings.on_stale}), "
        f"{counted(settings.groups_per_step, 'group')} of {settings.group_size} per step, a version every "
        f"{counted(settings.publish_every, 'step')}",
        "",
        *table(header, states, left_aligned=(0, 6)),
    ]
    due = record_table("groups that no batch has taken, by the version at their admission", buffer.due[:DUE_ROWS])
    lines += ["", *due] if due else []
    if newer := buffer.due[DUE_ROWS:]:
        lines.append(f"({sum(due.running + due.finished for due in newer)} groups have newer versions)")
    return Page(document, lines)


def _cell(value: Value | None, form: Callable[[Value], str], unknown: str = "") -> str:
    return unknown if value is None else form(value)


# -- a list of groups


def list_page(run: RunDirectory, connection: sqlite3.Connection, state: GroupState | None, limit: int) -> Page:
    """List the newest groups in a state, or in any state."""
    rows = list_groups(connection, state, limit + 1)
    has_more = len(rows) > limit
    document = {
        "run": run.run_id,
        "phase": run.status,
        "state": state,
        "groups": [asdict(row) for row in rows[:limit]],
        "more": has_more,
    }
    if not rows:
        return Page(document, [f"no group of {run.run_id} matches"])
    group_size, current_time = progress(connection).settings.group_size, time.time()
    cells = [
        (
            str(row.group_id),
            row.uid if len(row.uid) <= UID_WIDTH else f"…{row.uid[1 - UID_WIDTH :]}",
            f"{row.state}: {row.reason}" if row.reason else row.state,
            str(row.version),
            _cell(row.staleness, str, "-"),
            _cell(row.step, str, "-"),
            f"{row.rollouts}/{group_size}",
            f"{row.tokens:,}",
            _cell(row.reward, number, "-"),
            duration(current_time - row.admitted_at),
        )
        for row in rows[:limit]
    ]
    header = ("group", "prompt", "state", "version", "staleness", "step", "ended", "tokens", "reward", "age")
    lines = table(header, cells, left_aligned=(1, 2))
    return Page(document, [*lines, *([f"(the {limit} newest; --limit shows more)"] if has_more else [])])


# -- one group, one rollout


def group_page(run: RunDirectory, connection: sqlite3.Connection, group_id: int) -> Page:
    """Show a group. Raises ``RunArgumentError`` if there is no such group."""
    try:
        return _group_page(run, group_record(connection, group_id))
    except LookupError as error:
        hint = f"list groups: asyncrl inspect buffer {run.argument} --limit 20"
        raise RunArgumentError(str(error), location=run.run_id, hint=hint) from None


def rollout_page(run: RunDirectory, connection: sqlite3.Connection, rollout_id: str) -> Page:
    """Show a rollout (``12-3``) with its group, token by token.

    Raises ``RunArgumentError`` if there is no record of it.
    """
    try:
        record = group_record(connection, group_and_index(rollout_id)[0])
    except LookupError as error:
        raise RunArgumentError(str(error), location=run.run_id, hint="ids are GROUP-INDEX, from 0") from None
    rollouts = tuple(rollout for rollout in record.rollouts if rollout.rollout_id == rollout_id)
    if not rollouts:
        group_id = record.row.group_id
        raise RunArgumentError(
            f"rollout {rollout_id} has no record yet",
            location=run.run_id,
            hint=f"see the records of its group: asyncrl inspect buffer {run.argument} --group {group_id}",
        )
    return _group_page(run, replace(record, rollouts=rollouts))


def _group_page(run: RunDirectory, record: GroupRecord) -> Page:
    decoder = open_decoder(run)
    row = record.row
    with_tokens = len(record.rollouts) == 1
    lines = [f"{name:12}{cell(name, value)}" for name, value in asdict(row).items() if value not in (None, "")]
    lines.append(
        f"prompt      {len(record.prompt_ids)} tokens" if record.prompt_ids else f"prompt      {EPISODE_PROMPT}"
    )
    content = record.prompt.content
    if isinstance(content, str):
        lines += paragraph(content, "    ")
    else:
        for message in content:
            lines += [f"  {message.get('role', '?')}", *paragraph(message_text(message.get("content") or ""), "    ")]
    if record.prompt.fields:
        lines += ["fields", *paragraph(json.dumps(record.prompt.fields, ensure_ascii=False), "    ")]
    documents = []
    for rollout in record.rollouts:
        segments = _decoded_segments(rollout, decoder)
        lines += ["", *_rollout_lines(rollout, segments, with_tokens)]
        documents.append(_rollout_document(rollout, segments))
    if not with_tokens and record.rollouts:
        lines += ["", f"(`--rollout {record.rollouts[0].rollout_id}` shows the log-prob of every token)"]
    if decoder is None:
        lines += ["", "(tokens are shown as ids: there is no tokenizer.json in the run's model_stub/)"]
    document = {
        "run": run.run_id,
        **asdict(row),
        "prompt": content,
        "fields": record.prompt.fields,
        "prompt_ids": record.prompt_ids,
        "images": _image_documents(record.images),
        "rollouts": documents,
    }
    return Page(document, lines)


@dataclass(frozen=True, slots=True)
class _DecodedSegment:
    """A segment with its text, None without a tokenizer. ``tokens`` are its tokens' texts, or their ids."""

    segment: Segment
    branch: int
    text: str | None
    tokens: Sequence[str]


def _decoded_segments(rollout: RolloutRecord, decoder: Decoder | None) -> list[_DecodedSegment]:
    decoded = []
    for sequence_id, group in groupby(rollout.segments, key=lambda segment: segment.rollout_id):
        segments = list(group)
        ids = [token for segment in segments for token in segment.ids.tolist()]
        texts: Sequence[str | None] = [None] * len(segments)
        tokens = [str(token) for token in ids]
        if decoder is not None:
            texts = decoder.split_text(ids, [segment.end for segment in segments])
            token_texts = zip(decoder.token_texts(ids), ids, strict=True)
            tokens = [json.dumps(text, ensure_ascii=False) if text else f"#{token}" for text, token in token_texts]
        branch = sequence_of(sequence_id)[-1]
        decoded += [
            _DecodedSegment(segment, branch, text, tokens[segment.start : segment.end])
            for segment, text in zip(segments, texts, strict=True)
        ]
    return decoded


def _rollout_lines(rollout: RolloutRecord, segments: Sequence[_DecodedSegment], with_tokens: bool) -> Iterator[str]:
    unscored = "masked, its reward is None" if rollout.masked else "no reward yet"
    score = "failed" if rollout.failure else _cell(rollout.reward, lambda reward: f"reward {number(reward)}", unscored)
    end = ENDS.get(rollout.finish_reason, rollout.finish_reason)
    yield f"rollout {rollout.rollout_id}: {score}; {rollout.tokens} tokens, {end}"
    if rollout.failure:
        yield from paragraph(rollout.failure, "    ")
    if rollout.metrics:
        metrics = ", ".join(f"{name} {number(value)}" for name, value in sorted(rollout.metrics.items()))
        yield from paragraph(f"metrics: {metrics}", "  ")
    if len(rollout.turns) > 1:
        yield from paragraph(f"rewards of its turns: {', '.join(number(turn.reward) for turn in rollout.turns)}", "  ")
    if rollout.tokens and not rollout.segments:
        yield "  (its tokens were dropped: journal.keep)"
    for branch, of_branch in groupby(segments, key=lambda decoded: decoded.branch):
        if branch:
            yield f"  branch {branch}: another conversation of the same rollout"
        for decoded in of_branch:
            yield from _segment_lines(decoded, with_tokens)


def _segment_lines(decoded: _DecodedSegment, with_tokens: bool) -> Iterator[str]:
    logprobs = decoded.segment.logprobs
    if decoded.segment.version == CONTEXT:
        yield f"  context, {len(logprobs)} tokens"
        yield from paragraph(" ".join(decoded.tokens) if decoded.text is None else decoded.text, CONTEXT_MARGIN)
        return
    statistics = f"log-prob mean {logprobs.mean():.3f}, lowest {logprobs.min():.3f}"
    yield f"  version {decoded.segment.version}, {len(logprobs)} tokens, {statistics}"
    if decoded.text is not None:
        yield from paragraph(decoded.text, "    ")
    if with_tokens or decoded.text is None:
        line = TOKEN_MARGIN
        for token, logprob in zip(decoded.tokens, logprobs.tolist(), strict=True):
            cell = f" {token} {logprob:.2f}"
            if len(line) + len(cell) > WIDTH:
                yield line
                line = TOKEN_MARGIN
            line += cell
        yield line


def _rollout_document(rollout: RolloutRecord, segments: Sequence[_DecodedSegment]) -> dict[str, Any]:
    facts = ("tokens", "finish_reason", "reward", "turns", "failure", "masked", "metrics", "recorded_at")
    return {
        "rollout": rollout.rollout_id,
        **{name: getattr(rollout, name) for name in facts},
        "images": _image_documents(rollout.images),
        "segments": [
            {
                "branch": decoded.branch,
                "start": decoded.segment.start,
                "version": None if decoded.segment.version == CONTEXT else decoded.segment.version,
                "ids": decoded.segment.ids.tolist(),
                # JSON has no infinity and no NaN.
                "logprobs": [value if math.isfinite(value) else None for value in decoded.segment.logprobs.tolist()],
                "text": decoded.text,
            }
            for decoded in segments
        ],
    }


def _image_documents(images: Sequence[PlacedImage]) -> list[dict[str, Any]]:
    return [{"image": image.image.digest, "start": image.offset, "tokens": image.length} for image in images]
