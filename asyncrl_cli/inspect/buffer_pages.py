"""The pages of `asyncrl inspect buffer`: the entire buffer, a list of groups, one group, one rollout.

Steps are counted from 1 here, as in metrics.jsonl; the journal counts from 0.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, TypeVar

from asyncrl_cli.core.errors import RunArgumentError
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.inspect.decoding import Decoder, images_of, message_text, open_decoder
from asyncrl_cli.inspect.pages import WIDTH, Page, duration, moment, number, paragraph, table
from asyncrl_cli.journal.progress import progress
from asyncrl_cli.journal.queries import (
    RECENT_GROUPS,
    GroupFilter,
    GroupRecord,
    GroupRow,
    RolloutRecord,
    group_record,
    groups_called,
    list_groups,
    overview,
)
from asyncrl_cli.records.generation import CONTEXT, Segment, group_and_index, sequence_of
from asyncrl_cli.records.images import PlacedImage
from asyncrl_cli.runs.directory import RunDirectory

DUE_ROWS = 12
"""Largest number of admission versions with their own row; the oldest versions come first."""
TOKENS_SHOWN = 4000
"""A group with more sampled tokens shows log-probs of tokens only on its rollouts' pages."""
UID_WIDTH = 20
TOKEN_MARGIN = "    |"
CONTEXT_MARGIN = "  > "
"""The margin of context, which is text that the policy did not sample."""
AGES = {"running": "since admission", "finished": "waiting for a batch", "taken": "since the batch was taken"}
REASONS = {
    "uniform": "all rewards are equal",
    "failed": "a rollout failed past its retries",
    "unscored": "fewer than two rollouts have a reward: it returned None for the others",
}
"""Why a group was rejected, by the ledger's name for the reason."""
ENDS = {None: "no end yet", "stop": "ended by the model", "length": "truncated at rollout.max_response_tokens"}
"""Meanings of finish reasons."""
Value = TypeVar("Value")


# -- the entire buffer


def overview_page(run: RunDirectory, connection: sqlite3.Connection) -> Page:
    """Show counts, ages, deadlines, lengths and rewards."""
    found = overview(connection)
    document = asdict(found)
    document |= {"run": run.run_id, "phase": run.status, **document.pop("progress")}
    settings = found.progress.settings
    rejected = ", ".join(f"{reason} {count}" for reason, count in sorted(found.rejected.items()))
    states = [
        (
            count.state,
            f"{count.groups:,}",
            _known(count.rollouts, lambda ended: f"{ended:,} of {count.groups * settings.group_size:,}"),  # noqa: B023
            _known(count.tokens, "{:,}".format),
            _known(count.age_s, duration),
            _known(count.oldest_s, duration),
            rejected if count.state == "rejected" else AGES.get(count.state, "") if count.groups else "",
        )
        for count in found.states
    ]
    header: tuple[str, ...] = ("groups", "count", "ended rollouts", "tokens", "median age", "oldest", "")
    lines = [
        f"run      {run.run_id}, {run.status}",
        f"progress {found.progress.step} of {settings.total_steps} batches taken, "
        f"weight version {found.progress.version}",
        f"bound    at most {counted(settings.max_staleness, 'version')} (on_stale: {settings.on_stale}), "
        f"{counted(settings.groups_per_step, 'group')} of {settings.group_size} per step, a version every "
        f"{counted(settings.publish_every, 'step')}",
        "",
        *table(header, states, left=(0, 6)),
    ]
    if found.due:
        due = [(one.version, one.staleness, one.deadline, one.running, one.finished) for one in found.due]
        rows = [tuple(map(str, row)) for row in due[:DUE_ROWS]]
        if newer := due[DUE_ROWS:]:
            rows.append(("newer", "", "", str(sum(row[3] for row in newer)), str(sum(row[4] for row in newer))))
        lines += [
            "",
            *table(("admitted at version", "staleness if taken now", "deadline", "running", "finished"), rows),
        ]
    for name, distributions in (("length (tokens)", found.lengths), ("reward", found.rewards)):
        if distributions:
            quantiles = ("minimum", "p10", "median", "p90", "maximum")
            rows = [
                (one.state, f"{one.count:,}", number(one.mean), *(number(getattr(one, name)) for name in quantiles))
                for one in distributions
            ]
            header = (name, "rollouts", "mean", "min", "10 %", "50 %", "90 %", "max")
            lines += ["", *table(header, rows)]
    if masked := [f"{state} {count:,}" for state, count in found.masked.items() if count]:
        lines += ["", f"masked rollouts (the reward is None): {', '.join(masked)}"]
    if found.lengths:
        lines.append(f"(over the {RECENT_GROUPS:,} newest groups of each state; running: tokens so far)")
    return Page(document, lines)


def _known(value: Value | None, shown: Callable[[Value], str], unknown: str = "") -> str:
    return unknown if value is None else shown(value)


# -- a list of groups


def list_page(run: RunDirectory, connection: sqlite3.Connection, wanted: GroupFilter, limit: int) -> Page:
    """List the newest groups that pass a filter."""
    found = list_groups(connection, wanted, limit + 1)
    rows, more = found[:limit], len(found) > limit
    document = {
        "run": run.run_id,
        "phase": run.status,
        "filter": asdict(wanted),
        "groups": [_group_document(row) for row in rows],
        "more": more,
    }
    if not rows:
        return Page(document, [f"no group of {run.run_id} matches"])
    size, now = progress(connection).settings.group_size, time.time()
    cells = [
        (
            str(row.group_id),
            row.uid if len(row.uid) <= UID_WIDTH else f"…{row.uid[1 - UID_WIDTH :]}",
            f"{row.state}: {row.reason}" if row.reason else row.state,
            str(row.version),
            _known(row.staleness, str, "-"),
            _known(row.step, lambda step: str(step + 1), "-"),
            f"{row.rollouts}/{size}",
            f"{row.tokens:,}",
            _known(row.reward, number, "-"),
            duration(now - row.admitted_at),
        )
        for row in rows
    ]
    header = ("group", "prompt", "state", "version", "staleness", "step", "ended", "tokens", "reward", "age")
    lines = table(header, cells, left=(1, 2))
    if more:
        lines.append(f"(the {limit} newest; --limit shows more)")
    return Page(document, lines)


def _group_document(row: GroupRow) -> dict[str, Any]:
    return asdict(row) | {"step": None if row.step is None else row.step + 1}


# -- one group, one rollout


def group_page(run: RunDirectory, connection: sqlite3.Connection, name: str, saved_to: Path | None = None) -> Page:
    """Show the group with this id, or the newest group of the prompt with this uid. Save its images to ``saved_to``.

    Raises ``RunArgumentError`` if there is no such group.
    """
    found = groups_called(connection, name)
    if not found:
        raise RunArgumentError(
            f"no group has the id or the prompt uid {name!r}",
            location=run.run_id,
            hint=f"list groups, or use --min-reward or --stale-over: asyncrl inspect buffer {run.argument} --limit 20",
        )
    page = _group_page(run, connection, group_record(connection, found[-1]), saved_to)
    if len(found) > 1:
        others = ", ".join(map(str, found[:-1]))
        page.lines.insert(0, f"(the prompt was admitted {len(found)} times; earlier groups: {others})\n")
    page.document["groups_of_prompt"] = found
    return page


def rollout_page(
    run: RunDirectory, connection: sqlite3.Connection, rollout_id: str, saved_to: Path | None = None
) -> Page:
    """Show a rollout (``12-3``) with its group. Save its images to ``saved_to``.

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
    return _group_page(run, connection, replace(record, rollouts=rollouts), saved_to)


def _group_page(run: RunDirectory, connection: sqlite3.Connection, record: GroupRecord, saved_to: Path | None) -> Page:
    decoder = open_decoder(run)
    row, settings = record.row, progress(connection).settings
    with_tokens = sum(rollout.tokens for rollout in record.rollouts) <= TOKENS_SHOWN or len(record.rollouts) == 1
    reward = _known(row.reward, lambda mean: f", mean reward {number(mean)}")
    size = f"{len(record.prompt_ids)} tokens" if record.prompt_ids else "of an episode: see the context of its rollouts"
    lines = [
        f"group    {row.group_id}, prompt {row.uid}: {row.state}{f' ({row.reason})' if row.reason else ''}",
        f"when     {_when(row, settings.max_staleness)}",
        f"rollouts {row.rollouts} of {settings.group_size} ended, {row.tokens:,} tokens{reward}",
        *([f"why      {REASONS.get(row.reason, row.reason)}"] if row.reason else []),
        f"prompt   {size}",
    ]
    content = record.prompt.content
    if isinstance(content, str):
        lines += paragraph(content, "    ")
    else:
        for message in content:
            lines += [f"  {message.get('role', '?')}", *paragraph(message_text(message.get("content") or ""), "    ")]
    images = images_of(record)
    lines += [f"image    {line}" for line in images.values()]
    if saved_to is not None and images:
        saved_to.mkdir(parents=True, exist_ok=True)
        for image in images:
            (saved_to / image.file_name).write_bytes(image.data)
    if record.prompt.fields:
        lines += ["fields", *paragraph(json.dumps(record.prompt.fields, ensure_ascii=False), "    ")]
    documents = []
    for rollout in record.rollouts:
        sequences = _sequences(rollout, decoder)
        lines += ["", *_rollout_lines(rollout, sequences, with_tokens)]
        documents.append(_rollout_document(rollout, sequences))
    if not with_tokens:
        lines += ["", f"(`--rollout {record.rollouts[0].rollout_id}` shows the log-prob of every token)"]
    if decoder is None:
        lines += ["", "(tokens are shown as ids: there is no tokenizer.json in the run's model_stub/)"]
    document = {
        "run": run.run_id,
        **_group_document(row),
        "prompt": content,
        "fields": record.prompt.fields,
        "prompt_ids": record.prompt_ids,
        "images": _places(record.images),
        "rollouts": documents,
    }
    return Page(document, lines)


def _places(images: Sequence[PlacedImage]) -> list[dict[str, Any]]:
    return [{"image": one.image.digest, "start": one.offset, "tokens": one.length} for one in images]


def _when(row: GroupRow, bound: int) -> str:
    text = f"admitted {moment(row.admitted_at)} at version {row.version}"
    if row.staleness is None:
        return text
    age = counted(row.staleness, "version")
    if row.step is not None:
        return f"{text}; taken in step {row.step + 1}, {age} later (bound {bound})"
    return f"{text}, {age} ago; to be taken by version {row.version + bound}"


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment with its text."""

    segment: Segment
    branch: int
    text: str | None
    """None without a tokenizer."""
    names: Sequence[str]
    """Texts of its tokens, or their ids."""


def _sequences(rollout: RolloutRecord, decoder: Decoder | None) -> list[list[_Part]]:
    found = []
    for rollout_id, segments in groupby(rollout.segments, key=lambda segment: segment.rollout_id):
        sequence = list(segments)
        ids = [token for segment in sequence for token in segment.ids.tolist()]
        texts: Sequence[str | None] = [None] * len(sequence)
        names = [str(token) for token in ids]
        if decoder is not None:
            texts = decoder.parts(ids, [segment.end for segment in sequence])
            pieces = zip(decoder.pieces(ids), ids, strict=True)
            names = [json.dumps(piece, ensure_ascii=False) if piece else f"#{token}" for piece, token in pieces]
        branch = sequence_of(rollout_id)[-1]
        parts = zip(sequence, texts, strict=True)
        found.append(
            [
                _Part(segment, branch=branch, text=text, names=names[segment.start : segment.end])
                for segment, text in parts
            ]
        )
    return found


def _rollout_lines(rollout: RolloutRecord, sequences: Sequence[Sequence[_Part]], with_tokens: bool) -> Iterator[str]:
    unknown = "masked, its reward is None" if rollout.masked else "no reward yet"
    judged = "failed" if rollout.failure else _known(rollout.reward, lambda r: f"reward {number(r)}", unknown)
    end = ENDS.get(rollout.finish_reason, rollout.finish_reason)
    yield f"rollout {rollout.rollout_id}: {judged}; {rollout.tokens} tokens{_size(sequences)}, {end}"
    if rollout.failure:
        yield from paragraph(rollout.failure, "    ")
    if rollout.metrics:
        measured = ", ".join(f"{name} {number(value)}" for name, value in sorted(rollout.metrics.items()))
        yield from paragraph(f"metrics: {measured}", "  ")
    if len(rollout.turns) > 1:
        yield from paragraph(f"rewards of its turns: {', '.join(number(turn.reward) for turn in rollout.turns)}", "  ")
    if rollout.tokens and not rollout.segments:
        yield "  (its tokens were dropped: journal.keep)"
    for sequence in sequences:
        if branch := sequence[0].branch:
            yield f"  branch {branch}: another conversation of the same rollout{_size([sequence])}"
        for part in sequence:
            yield from _part_lines(part, with_tokens)


def _part_lines(part: _Part, with_tokens: bool) -> Iterator[str]:
    logprobs = part.segment.logprobs
    if part.segment.version == CONTEXT:
        yield f"  context, {len(logprobs)} tokens"
        yield from paragraph(" ".join(part.names) if part.text is None else part.text, CONTEXT_MARGIN)
        return
    measured = f"log-prob mean {logprobs.mean():.3f}, lowest {logprobs.min():.3f}"
    yield f"  version {part.segment.version}, {len(logprobs)} tokens, {measured}"
    if part.text is not None:
        yield from paragraph(part.text, "    ")
    if with_tokens or part.text is None:
        line = TOKEN_MARGIN
        for name, logprob in zip(part.names, logprobs.tolist(), strict=True):
            cell = f" {name} {logprob:.2f}"
            if len(line) + len(cell) > WIDTH:
                yield line
                line = TOKEN_MARGIN
            line += cell
        yield line


def _size(sequences: Sequence[Sequence[_Part]]) -> str:
    """The calls, context and branches of a rollout; empty for a single turn."""
    segments = [[part.segment for part in sequence] for sequence in sequences]
    context = sum(len(one.ids) for one in chain.from_iterable(segments) if one.version == CONTEXT)
    if not context:
        return ""
    # A call is an uninterrupted run of sampled tokens.
    runs = chain.from_iterable(groupby(some, lambda one: one.version == CONTEXT) for some in segments)
    size = f" in {counted(sum(not is_context for is_context, _ in runs), 'call')}, {context} of context"
    return f"{size}, {counted(len(sequences) - 1, 'branch')}" if len(sequences) > 1 else size


def _rollout_document(rollout: RolloutRecord, sequences: Sequence[Sequence[_Part]]) -> dict[str, Any]:
    facts = ("tokens", "finish_reason", "reward", "turns", "failure", "masked", "metrics", "recorded_at")
    return {
        "rollout": rollout.rollout_id,
        **{name: getattr(rollout, name) for name in facts},
        "images": _places(rollout.images),
        "segments": [
            {
                "branch": part.branch,
                "start": part.segment.start,
                "version": None if part.segment.version == CONTEXT else part.segment.version,
                "ids": part.segment.ids.tolist(),
                # JSON has no infinity and no NaN.
                "logprobs": [value if math.isfinite(value) else None for value in part.segment.logprobs.tolist()],
                "text": part.text,
            }
            for part in chain.from_iterable(sequences)
        ],
    }
