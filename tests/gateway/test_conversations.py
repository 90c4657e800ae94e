"""Conversations in token space with random clients: each sampled token is kept once, and never tokenized again."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncrl_cli.gateway.session import CallOptions, Reply, Session, SessionLimits, SessionRecord
from asyncrl_cli.records.generation import CONTEXT, Rollout, Sampling, Segment
from tests.gateway.conversation_stand_ins import (
    CALC,
    HashModel,
    Record,
    ask_chat,
    byte_chat,
    character_chat,
    rollout_of,
    sampled_runs,
    tokens_of,
)

pytestmark = pytest.mark.slow

Messages = list[dict[str, Any]]
LIMITS = SessionLimits(max_length=4000, max_call_tokens=400)
SAMPLING = Sampling(temperature=1.0, max_tokens=400, seed=5)


@dataclass(frozen=True)
class Op:
    """One call. It starts a conversation, or continues the conversation number ``of``, branches from one of its earlier
    messages (`fork`), or repeats its last call."""

    kind: str
    of: int
    text: str
    n: int = 1
    max_tokens: int | None = None
    disguise: bool = False
    tools: bool = True
    quiet: bool = False  # a variable of the template
    begun: str = ""  # of the reply, in the request


OPS = st.builds(
    Op,
    kind=st.sampled_from(["new", "continue", "continue", "continue", "fork", "repeat"]),
    of=st.integers(0, 20),
    text=st.text(min_size=1, max_size=6) | st.sampled_from(["abc", "café 1+1", "<|im_end|>", "[", "</tool_call>"]),
    n=st.sampled_from([1, 1, 1, 2]),
    max_tokens=st.sampled_from([None, None, 1, 3, 20]),
    disguise=st.booleans(),
    tools=st.sampled_from([True, True, True, False]),
    quiet=st.sampled_from([False, False, False, True]),
    begun=st.sampled_from(["", "", "", "It is ", "ab", "<|im_end|> é"]),
)
ROUNDS = st.lists(st.lists(OPS, min_size=1, max_size=3), min_size=1, max_size=6)
"""The calls of a round run at the same time."""


class Harness:
    """Makes rounds of calls in a session, like a program that knows messages but no tokens."""

    def __init__(self, session: Session, chat: Any) -> None:
        self._session = session
        self._chat = chat
        self._is_bytes = chat is byte_chat()
        self.conversations: list[tuple[Messages, bool, bool]] = []
        """Each ends with a reply; whether it has tools, and whether it is quiet."""
        self.replies: list[Reply] = []

    async def play(self, rounds: Sequence[Sequence[Op]]) -> None:
        for ops in rounds:
            asked = [self._messages(op) for op in ops]
            answers = await asyncio.gather(*map(self._call, ops, asked))
            for op, (messages, tools, quiet), replies in zip(ops, asked, answers, strict=True):
                self.replies += replies
                for reply in replies:
                    prompt = self._chat.decode(reply.prompt_ids, special=True)
                    end = op.begun or ("</think>\n\n" if quiet else "")
                    assert prompt.endswith(end) or not self._is_bytes, "nothing follows; the other model lacks letters"
                    whole = {**reply.message, "content": op.begun + (reply.message["content"] or "")}
                    message = whole if op.begun else dict(reply.message)
                    self.conversations.append(([*messages, message], tools, quiet))

    async def _call(self, op: Op, asked: tuple[Messages, bool, bool]) -> list[Reply]:
        messages, tools, quiet = asked
        sent = [disguised(message) if op.disguise else dict(message) for message in messages]
        sent += [{"role": "assistant", "content": op.begun}] if op.begun else []
        options = CallOptions(max_tokens=op.max_tokens, n=op.n)
        more = {"variables": {"quiet": True} if quiet else None, "continues": bool(op.begun)}
        return await ask_chat(self._session, sent, [CALC] if tools else None, options, **more)

    def _messages(self, op: Op) -> tuple[Messages, bool, bool]:
        if op.kind == "new" or not self.conversations:
            return [{"role": "user", "content": op.text}], op.tools, self._is_bytes and op.quiet
        messages, tools, quiet = self.conversations[op.of % len(self.conversations)]
        if op.kind == "repeat":
            return messages[:-1], tools, quiet
        if op.kind == "fork":
            replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            messages = messages[: replies[op.of % len(replies)] + 1]
        results: Messages = [
            {"role": "tool", "tool_call_id": call["id"], "content": op.text}
            for call in messages[-1].get("tool_calls", ())
        ]
        return messages + (results or [{"role": "user", "content": op.text}]), tools, quiet


def disguised(message: dict[str, Any]) -> dict[str, Any]:
    """The same message in the format of another library."""
    same = {**message, "refusal": None, "annotations": [], "name": None}
    if message["role"] == "assistant" and not message.get("content"):
        same["content"] = "" if message.get("content") is None else None
    elif message.get("content"):
        same["content"] = [{"type": "text", "text": part} for part in (message["content"][:2], message["content"][2:])]
    if calls := message.get("tool_calls"):
        same["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": indented(call["function"]["arguments"])}, "index": 0}
            for call in calls
        ]
    return same


def indented(arguments: str) -> str:
    return json.dumps(json.loads(arguments), indent=1)


def play(
    rounds: Sequence[Sequence[Op]], chat: Any, recorded: dict[int, tuple[Segment, ...]] | None = None
) -> tuple[Harness, HashModel, list[Segment], Rollout]:
    """Make the rounds of calls in a new session; returns the segments that it reported, in order."""
    model, reported = HashModel(chat), []
    session = Session(
        *("7-2", chat, model.generate, SAMPLING, LIMITS),
        fixed_sampling=True,
        record=SessionRecord(recorded or {}, reported.extend),
    )
    harness = Harness(session, chat)
    asyncio.run(harness.play(rounds))
    rollout = rollout_of(session)
    return harness, model, reported, rollout


@given(ROUNDS, st.sampled_from(["bytes", "characters"]))
@settings(max_examples=80)
def test_every_token_is_sampled_once_and_no_turn_is_tokenized_again(rounds: list[list[Op]], which: str) -> None:
    chat = byte_chat() if which == "bytes" else character_chat()
    harness, model, reported, rollout = play(rounds, chat)

    # The sequences contain exactly the model's prompts and replies: each reply once, and nothing else.
    asked = Counter((request.prompt_ids, tuple(reply.ids.tolist())) for request, reply in model.requests)
    assert Counter(sampled_runs(rollout)) == asked
    assert Counter((reply.prompt_ids, reply.token_ids) for reply in harness.replies) == asked
    for sequence in rollout.sequences:
        assert (sequence.logprobs[sequence.versions == CONTEXT] == 0).all()
        assert sequence.versions[0] == CONTEXT

    # If a call's messages begin with an earlier turn's messages, its prompt begins with exactly that turn's tokens.
    exchanges = list(zip(harness.conversations, harness.replies, strict=True))
    for index, ((messages, *setting), reply) in enumerate(exchanges):
        turns = {
            (len(before), (*earlier.prompt_ids, *earlier.token_ids))
            for (before, *earlier_setting), earlier in exchanges[:index]
            if earlier_setting == setting and before == messages[: len(before)] and len(before) < len(messages)
        }
        longest = max((length for length, _ in turns), default=0)
        tokens = [turn for length, turn in turns if length == longest]
        assert not turns or any(reply.prompt_ids[: len(turn)] == turn for turn in tokens)

    # The reported segments are exactly the rollout.
    record = Record()
    record.add(reported)
    assert set(record.sequences) == {sequence.rollout_id for sequence in rollout.sequences}
    for sequence in rollout.sequences:
        known = record.sequences[sequence.rollout_id].tokens
        assert known.ids.tolist() == sequence.ids.tolist()
        assert known.versions.tolist() == sequence.versions.tolist()
        assert known.logprobs.tolist() == sequence.logprobs.tolist()
    assert sum(len(segment.ids) for segment in reported) == sum(len(s.ids) for s in rollout.sequences)


@given(ROUNDS, st.data())
@settings(max_examples=60)
def test_replayed_from_any_point_a_rollout_is_the_same_and_no_recorded_token_is_sampled_again(
    rounds: list[list[Op]], data: st.DataObject
) -> None:
    _, model, reported, rollout = play(rounds, byte_chat())
    cut_at = data.draw(st.integers(0, len(reported)))
    record = Record()
    record.add(reported[:cut_at])
    recorded = record.recorded()
    # Of two calls with the same prompt, the first one may continue the recorded tokens of the other.
    openings = [tuple(sequence.ids[: sequence.sampled.argmax()]) for sequence in rollout.sequences]
    taken = [openings[number] for number in recorded]
    assume(not any(opening in taken for number, opening in enumerate(openings) if number not in recorded))

    _, again, reported_again, same = play(rounds, byte_chat(), dict(recorded))
    assert list(tokens_of(same)) == list(tokens_of(rollout))
    kept = sum(len(s.ids) for parts in recorded.values() for s in parts if s.version != CONTEXT)
    assert len(again.sampled) == len(model.sampled) - kept
    assert not Counter(again.sampled) - Counter(model.sampled)
    # The segments reported now continue where the record ends.
    record.add(reported_again)
    for sequence in same.sequences:
        assert record.sequences[sequence.rollout_id].tokens.ids.tolist() == (sequence.ids.tolist())
