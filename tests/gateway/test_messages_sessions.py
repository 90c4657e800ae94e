"""Conversations over the Messages API on a session: when a program sends back the reply, its tokens are continued."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_messages_blocks import TEXTS, javascript

from asyncrl_cli.gateway.messages_reply import reply_blocks
from asyncrl_cli.gateway.messages_request import MessagesRequest
from asyncrl_cli.gateway.session import CallOptions, Session, SessionLimits
from asyncrl_cli.records.generation import Sampling
from tests.gateway.conversation_stand_ins import CALC, HashModel, ask_chat, byte_chat, character_chat

TOOL: dict[str, Any] = {"name": CALC["function"]["name"], "input_schema": {"type": "object", "properties": {}}}


def answered(call: dict[str, Any], text: str, is_error: bool) -> dict[str, Any]:
    content = [{"type": "text", "text": text}]
    return {"type": "tool_result", "tool_use_id": call["id"], "content": content, "is_error": is_error}


@pytest.mark.slow
@given(st.sampled_from([byte_chat, character_chat]), st.lists(st.tuples(TEXTS, st.booleans()), min_size=1, max_size=5))
@settings(deadline=None, max_examples=60)
def test_every_call_continues_the_one_before(chat: Any, turns: list[tuple[str, bool]]) -> None:
    chat = chat()
    model = HashModel(chat)
    limits = SessionLimits(max_length=2**14, max_call_tokens=64)
    session = Session("7-2", chat, model.generate, Sampling(1.0, 64, seed=5), limits, fixed_sampling=True)
    history: list[Any] = []

    async def play() -> None:
        before: tuple[int, ...] = ()
        calls: list[dict[str, Any]] = []
        for index, (text, flag) in enumerate(turns):
            results = [answered(call, text, flag) for call in calls]
            mark = {"cache_control": {"type": "ephemeral"}}  # only on the newest block
            history.append({"role": "user", "content": [*results, {"type": "text", "text": text or "continue"}]})
            sent = [*history[:-1], {**history[-1], "content": [block | mark for block in history[-1]["content"]]}]
            body = {
                "max_tokens": 64,
                "system": f"x-anthropic-billing-header: cch={index};\nBe brief.",
                "messages": sent,
            }
            request = MessagesRequest.model_validate(body | {"tools": [TOOL]})
            (reply,) = await ask_chat(
                session, request.chat_messages(), request.offered_tools(), CallOptions(max_tokens=64)
            )
            assert reply.prompt_ids[: len(before)] == before
            before = (*reply.prompt_ids, *reply.token_ids)
            blocks: list[Any] = javascript(json.loads(json.dumps(reply_blocks(reply.message))))
            calls = [block for block in blocks if block["type"] == "tool_use"]
            history.append({"role": "assistant", "content": blocks})

    asyncio.run(play())
    rollout = session.rollout()
    assert rollout is not None
    assert rollout.branches == ()
