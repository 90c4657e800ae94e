"""Compare conversations, to find the earlier one that a call continues.

Messages are compared by digests, without their reasoning. Reasoning is compared only if the client sends it: a message
continues an earlier one if it comes without reasoning, or with the same reasoning. So a client may send back the
reasoning of some replies and omit others, but a conversation with changed reasoning is a new one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, takewhile
from typing import Any

from asyncrl_cli.gateway.parsers import Tools
from asyncrl_cli.gateway.wire import canonical_json
from asyncrl_cli.records.prompt import ChatError, Message, normalized

REASONING = ("reasoning_content", "reasoning")
"""The keys under which servers send and accept a message's reasoning."""


@dataclass(frozen=True, slots=True, eq=False)
class Reasoning:
    """A message's reasoning, linked to the ``earlier`` one: a conversation's turns share their digests. ``count``: the
    number of keys up to the message."""

    count: int
    digest: str
    earlier: Reasoning | None


@dataclass(frozen=True, slots=True)
class ConversationKey:
    """A conversation up to some message. Its keys are chained digests of the tools and of each message: ``count`` is
    their number, and ``key`` depends on all of them. ``reasoning``: the newest message's with reasoning."""

    count: int
    key: str
    reasoning: Reasoning | None = None

    def then(self, message: Message) -> ConversationKey:
        canonical = normalized(message)
        count = self.count + 1
        text = canonical.get("reasoning_content")
        reasoning = Reasoning(count, _digest(text), self.reasoning) if text else self.reasoning
        return ConversationKey(count, _chained(self.key, canonical_json(_spoken(canonical))), reasoning)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in canonical form. ``keys``: chained digests of the tools and of each message. ``reasoning``: digests by
    the number of keys up to the message."""

    messages: list[Message]
    keys: tuple[str, ...]
    reasoning: Mapping[int, str]
    characters: int

    @classmethod
    def of(
        cls, messages: Sequence[Message], tools: Tools | None, variables: Mapping[str, Any] | None = None
    ) -> Conversation:
        """``variables``: the template's variables; they are part of the tools' key. Raises ``ChatError``."""
        canonical = _with_one_system_message([normalized(message) for message in messages])
        if not canonical:
            raise ChatError("there are no messages")
        texts = [
            canonical_json([list(tools or ()), variables or {}]),
            *(canonical_json(_spoken(message)) for message in canonical),
        ]
        reasoning = {count: message.get("reasoning_content", "") for count, message in enumerate(canonical, 2)}
        return cls(
            canonical,
            tuple(accumulate(texts, _chained, initial=""))[1:],
            {count: _digest(text) for count, text in reasoning.items() if text},
            sum(map(len, texts)) + sum(map(len, reasoning.values())),
        )

    def covered_by(self, history: ConversationKey | None) -> int | None:
        """The number of keys that an earlier history covers; None if the conversation does not begin with it."""
        if history is None or history.count > len(self.keys) or self.keys[history.count - 1] != history.key:
            return None
        recorded = history.reasoning
        for count in reversed([count for count in self.reasoning if count <= history.count]):
            while recorded is not None and recorded.count > count:
                recorded = recorded.earlier
            if recorded is None or (recorded.count, recorded.digest) != (count, self.reasoning[count]):
                return None
        return history.count

    def after(self, history: ConversationKey | None, continues: bool = False) -> ConversationKey:
        """The history of all messages, or of all but the last if the reply ``continues`` it. ``history``: the earlier
        conversation that this one continues, if any; its reasoning is taken over."""
        covered, reasoning = (0, None) if history is None else (history.count, history.reasoning)
        end = len(self.keys) - continues
        while reasoning is not None and reasoning.count > end:
            reasoning = reasoning.earlier
        for count, digest in self.reasoning.items():
            if covered < count <= end:
                reasoning = Reasoning(count, digest, reasoning)
        return ConversationKey(end, self.keys[end - 1], reasoning)


def _with_one_system_message(messages: Sequence[Message]) -> list[Message]:
    """Join the system messages at the beginning, because many templates refuse or drop all but the first.

    A later system message becomes text in the user's turn: moved to the beginning, it would change all tokens after it.
    In such a turn, tool results come first (decision 0016).
    """
    system_count = sum(1 for _ in takewhile(lambda message: message["role"] == "system", messages))
    conversation = [*messages[:system_count]] if system_count < 2 else [_joined("system", messages[:system_count])]
    for is_reply, group in groupby(messages[system_count:], lambda message: message["role"] == "assistant"):
        turn = list(group)
        if not is_reply and any(message["role"] == "system" for message in turn):
            results = [message for message in turn if message["role"] == "tool"]
            turn = [*results, _joined("user", [message for message in turn if message["role"] != "tool"])]
        conversation += turn
    return conversation


def _joined(role: str, messages: Sequence[Message]) -> Message:
    contents = [message["content"] for message in messages if message["content"]]
    if all(isinstance(content, str) for content in contents):
        return {"role": role, "content": "\n\n".join(contents)}
    part_lists = [content if isinstance(content, list) else [{"type": "text", "text": content}] for content in contents]
    return normalized({"role": role, "content": list(chain.from_iterable(part_lists))})


def _spoken(message: Message) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in REASONING}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _chained(chain_digest: str, text: str) -> str:
    """The next digest of a chain. One digest stands for a whole conversation, so a turn keeps only one, however many
    messages there are."""
    return _digest(f"{chain_digest}/{text}")
