"""Digests of messages decide which conversation continues which."""

from __future__ import annotations

from typing import Any

from asyncrl_cli.gateway.history import Conversation

THOUGHTFUL: dict[str, Any] = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
SPOKEN: dict[str, Any] = {"role": "assistant", "content": "4"}
QUESTION: dict[str, Any] = {"role": "user", "content": "2+2?"}


def test_reasoning_may_be_sent_back_or_omitted_but_not_changed() -> None:
    history = Conversation.of([QUESTION], None).after(None).then(THOUGHTFUL)

    def covered(**changes: Any) -> bool:
        return Conversation.of([QUESTION, THOUGHTFUL | changes, QUESTION], None).covered_by(history) == 3

    assert covered()
    assert covered(reasoning_content=None, reasoning="2 and 2")
    assert covered(reasoning_content=None)
    assert covered(reasoning_content="")
    assert covered(reasoning_content=None, reasoning={"effort": "low"}), "not the reasoning's text"
    assert not covered(reasoning_content="2 or 2")
    assert not covered(content="5")
    assert not covered(role="user")


def test_reasoning_that_was_omitted_once_is_compared_when_it_is_sent_again() -> None:
    history = Conversation.of([QUESTION], None).after(None).then(THOUGHTFUL)
    later = Conversation.of([QUESTION, SPOKEN, QUESTION], None).after(history).then(THOUGHTFUL)
    changed = THOUGHTFUL | {"reasoning_content": "2 or 2"}
    for first, second, continues in (
        (THOUGHTFUL, SPOKEN, True),
        (SPOKEN, THOUGHTFUL, True),
        (THOUGHTFUL, THOUGHTFUL, True),
        (changed, SPOKEN, False),
        (SPOKEN, changed, False),
    ):
        asked = Conversation.of([QUESTION, first, QUESTION, second], None)
        assert (asked.covered_by(later) == 5) is continues


def test_reasoning_that_a_client_adds_to_a_message_is_another_conversation() -> None:
    history = Conversation.of([QUESTION, SPOKEN, QUESTION], None).after(None).then(SPOKEN)
    assert Conversation.of([QUESTION, SPOKEN, QUESTION, SPOKEN], None).covered_by(history) == 5
    assert Conversation.of([QUESTION, THOUGHTFUL, QUESTION, SPOKEN], None).covered_by(history) is None
