"""Sessions of agents, compared with the journal.

An agent's requests and answers were recorded by a proxy (``http_record``). The journal has the rollout's sequences:
context, and runs of sampled tokens, one run for each call. The two must agree:

- no request was refused, except at a limit of the task;
- each call has one run: the number of tokens before it is the length of the call's prompt, and its tokens are those of
  the reply, in number and in text;
- each run belongs to a call;
- if a call's run has sampled tokens before it, the call's request contains the whole conversation of the calls that
  sampled them. Conversely, if a request contains an earlier call that no other call has continued, its run follows the
  tokens of that call.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncrl_cli.gateway.parsers import hermes
from asyncrl_cli.records.generation import CONTEXT, TokenSequence
from tests.e2e.gateway.http_record import Exchange, Reply, conversation_of, is_call, limit_of, reply_of

Decode = Callable[[Sequence[int]], str]
CONTINUED = "calls that continue an earlier turn"


@dataclass(frozen=True)
class Run:
    """Sampled tokens of a sequence: those from ``start`` on."""

    sequence: str
    start: int
    ids: tuple[int, ...]


@dataclass
class Call:
    """A call that was answered: its request, its reply, and its run in the journal."""

    asked: list[Any]
    reply: Reply
    run: Run | None = None

    def continues(self, earlier: Call) -> bool:
        """Whether its conversation begins exactly with that call's conversation and the reply to it."""
        count = len(earlier.asked)
        return self.asked[:count] == earlier.asked and _replied(self.asked[count:]) == (
            earlier.reply.text,
            _calls(earlier.reply.calls),
        )


@dataclass(slots=True)
class Findings:
    """Counts by name. ``problems`` is empty if all checks pass."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        return f"{counts}; {len(self.problems)} problems"


def compare(session: dict[str, Any], sequences: Mapping[str, TokenSequence], decode: Decode) -> Findings:
    """Compare the record of a session with the sequences of its rollout, by their names."""
    found = Findings()
    calls = list(_answered(session, found))
    if session["failed"] and not found.counts["refusals at limits"]:
        found.problems.append(f"it failed: {session['failed'][-600:]}")
    runs = _runs(sequences)
    left = list(runs)
    for number, call in enumerate(calls):
        fitting = (run for run in left if _fits(call.reply, run, decode))
        if (run := next(fitting, None)) is None:
            found.problems.append(f"call {number} has no run of sampled tokens: {call.reply}")
        else:
            call.run = run
            left.remove(run)
    found.problems += [
        f"{len(run.ids)} tokens of {run.sequence} belong to no call: {decode(run.ids)!r}" for run in left
    ]
    found.counts["calls"] += len(calls)
    found.counts["replies with tool calls"] += sum(bool(call.reply.calls) for call in calls)
    continued_calls: list[Call] = []
    for number, call in enumerate(calls):
        if call.run is None:
            continue
        before = [run for run in runs if run.sequence == call.run.sequence and run.start < call.run.start]
        fitting_calls = [one for one in calls[:number] if one not in continued_calls and call.continues(one)]
        if before:
            found.counts[CONTINUED] += 1
            previous = next((one for one in calls[:number] if one.run == before[-1]), None)
            if previous is None or not call.continues(previous):
                found.problems.append(f"call {number} has tokens in its context that its request does not contain")
            else:
                continued_calls.append(previous)
        elif number:
            found.counts["calls that begin a branch"] += 1
            if fitting_calls:
                found.problems.append(f"call {number} begins a branch, though it contains an earlier call")
    return found


def _answered(session: dict[str, Any], found: Findings) -> Iterator[Call]:
    for row in session["exchanges"]:
        exchange = Exchange(**row)
        if limit_of(exchange):
            found.counts["refusals at limits"] += 1
        elif exchange.status >= 400:
            found.problems.append(f"{exchange.status} for {exchange.method} {exchange.path}: {exchange.answer[:500]}")
        elif is_call(exchange) and exchange.complete:
            try:
                yield Call(list(map(_meaning, conversation_of(exchange))), reply_of(exchange))
            except (ValueError, KeyError, TypeError) as error:
                found.problems.append(f"invalid answer of {exchange.path}: {error!r} in {exchange.answer[:500]}")


def _runs(sequences: Mapping[str, TokenSequence]) -> list[Run]:
    runs = []
    for name, tokens in sequences.items():
        edges = np.flatnonzero(np.diff(tokens.versions != CONTEXT, prepend=False, append=False))
        runs += [Run(name, int(first), tuple(tokens.ids[first:last].tolist())) for first, last in edges.reshape(-1, 2)]
    return runs


def _fits(reply: Reply, run: Run, decode: Decode) -> bool:
    if reply.usage is not None and reply.usage != (run.start, len(run.ids)):
        return False
    text = decode(run.ids)
    if reply.calls:
        read = hermes(text, ())
        return read is not None and _calls(read.calls) == _calls(reply.calls)
    return text == reply.text


def _calls(calls: Sequence[tuple[str, str]]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, json.loads(arguments)) for name, arguments in calls)


def _replied(items: Sequence[Any]) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """The text and the calls of the model's items at the beginning of ``items``, in any of the APIs."""
    text, calls = "", []
    for item in items:
        if item.get("role") == "assistant" and isinstance(item.get("content") or "", str):
            text += item.get("content") or ""
            calls += [
                (made["function"]["name"], made["function"]["arguments"]) for made in item.get("tool_calls") or ()
            ]
        elif item.get("role") == "assistant":
            text += "".join(part["text"] for part in item["content"] if "text" in part)
            uses = (part for part in item["content"] if part["type"] == "tool_use")
            calls += [(use["name"], json.dumps(use["input"])) for use in uses]
        elif item.get("type") == "function_call":
            calls.append((item["name"], item["arguments"]))
        elif item.get("type") != "reasoning":
            break
    return text, _calls(calls)


def _meaning(item: Any) -> Any:
    """A message whose content is a list of one text, with a plain text as content: programs use both forms."""
    content = item.get("content") if isinstance(item, dict) else None
    if isinstance(content, list) and len(content) == 1 and set(content[0]) == {"type", "text"}:
        return {**item, "content": content[0]["text"]}
    return item
