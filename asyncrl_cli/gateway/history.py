"""Conversations, as they are compared: which of the earlier ones does a call continue?

Messages are compared without their reasoning, by digests. The reasoning counts where a client sends it: a conversation
continues another if each message of both either comes without reasoning now, or with the one it had. So a client may
send the reasoning of replies back, or leave out that of any of them, and what it has changed is another conversation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from asyncrl_cli.gateway.json_values import key
from asyncrl_cli.gateway.parsers import Tools
from asyncrl_cli.records.prompt import ChatError, Message, normalized

REASONING = ("reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class ReasoningChain:
    """The reasoning of the message that key number ``count`` ends with, and that of messages before it. One is kept of
    every turn, so they share those before them."""

    count: int
    digest: str
    before: ReasoningChain | None


@dataclass(frozen=True, slots=True)
class History:
    """A conversation up to some message: the number of keys, of the tools and each message; the last of them, which
    follows from all; and the reasoning."""

    count: int
    last: str
    reasoning: ReasoningChain | None = None

    def then(self, message: Message) -> History:
        same = normalized(message)
        count = self.count + 1
        reasoning = self.reasoning
        if text := same.get("reasoning_content"):
            reasoning = ReasoningChain(count, _digest(text), reasoning)
        return History(count, _chained(self.last, key(_spoken(same))), reasoning)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in canonical form, with a key of the tools and of every beginning, and digests of the reasoning by the
    number of keys up to it."""

    messages: list[Message]
    keys: tuple[str, ...]
    reasoning: Mapping[int, str]
    characters: int

    @classmethod
    def of(
        cls, messages: Sequence[Message], tools: Tools | None, variables: Mapping[str, Any] | None = None
    ) -> Conversation:
        """``variables``: all of the template's, which belong to the key of the tools. Raises ``ChatError``."""
        canonical = _with_one_system_message([normalized(message) for message in messages])
        if not canonical:
            raise ChatError("there are no messages")
        texts = [key([list(tools or ()), variables or {}]), *(key(_spoken(message)) for message in canonical)]
        reasoning = {count: message.get("reasoning_content", "") for count, message in enumerate(canonical, 2)}
        return cls(
            canonical,
            tuple(accumulate(texts, _chained, initial=""))[1:],
            {count: _digest(text) for count, text in reasoning.items() if text},
            sum(map(len, texts)) + sum(map(len, reasoning.values())),
        )

    def covered_by(self, history: History | None) -> int | None:
        """How many of the keys an earlier history covers; None when the conversation does not begin with it."""
        if history is None or history.count > len(self.keys) or self.keys[history.count - 1] != history.last:
            return None
        known, link = {}, history.reasoning
        while link is not None:
            known[link.count] = link.digest
            link = link.before
        same = all(known.get(count) == digest for count, digest in self.reasoning.items() if count <= history.count)
        return history.count if same else None

    def after(self, history: History | None, continues: bool = False) -> History:
        """All of it, where it continues a history (None: it continues none); if the reply ``continues`` its last
        message, all but that."""
        covered, reasoning = (0, None) if history is None else (history.count, history.reasoning)
        end = len(self.keys) - continues
        for count, digest in self.reasoning.items():
            if covered < count <= end:
                reasoning = ReasoningChain(count, digest, reasoning)
        while reasoning is not None and reasoning.count > end:
            reasoning = reasoning.before
        return History(end, self.keys[end - 1], reasoning)


def _with_one_system_message(messages: Sequence[Message]) -> list[Message]:
    """Join the system messages of the beginning: many templates refuse further ones, or leave them out.

    A later one becomes text of the user's turn, because moving it to the beginning would change all tokens after it. In
    such a turn the results of tools come first (decision 0085).
    """
    first = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    found = [*messages[:first]] if first < 2 else [_joined("system", messages[:first])]
    for is_reply, group in groupby(messages[first:], lambda message: message["role"] == "assistant"):
        turn = list(group)
        if not is_reply and any(message["role"] == "system" for message in turn):
            results = [message for message in turn if message["role"] == "tool"]
            turn = [*results, _joined("user", [message for message in turn if message["role"] != "tool"])]
        found += turn
    return found


def _joined(role: str, messages: Sequence[Message]) -> Message:
    contents = [message["content"] for message in messages if message["content"]]
    if all(isinstance(content, str) for content in contents):
        return {"role": role, "content": "\n\n".join(contents)}
    parts = [part if isinstance(part, list) else [{"type": "text", "text": part}] for part in contents]
    return normalized({"role": role, "content": [part for own in parts for part in own]})


def _spoken(message: Message) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in REASONING}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _chained(before: str, text: str) -> str:
    """A digest of texts that are only compared, from that of all but the last (``before``): one is kept of every turn,
    however many messages it has."""
    return _digest(f"{before}/{text}")
