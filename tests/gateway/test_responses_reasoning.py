"""Reasoning over `/v1/responses`, read by the model's own parser, continues in the tokens that were sampled."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.gateway_stand_ins import Engine, chat_format, in_time, served
from tests.gateway.test_responses import FIND, calling, events


@pytest.mark.parametrize("sent_back", ["all", "encrypted", "none"])
def test_reasoning_is_continued_however_it_is_sent_back(sent_back: str) -> None:
    async def test() -> None:
        script = ["<think>Hm, x.</think>I look." + calling("find", {"q": "x"}), "<think>So.</think>Done."]
        replies = iter(script)
        engine = Engine(lambda prompt, request: next(replies), chat=chat_format("qwen3"))
        async with served(engine) as there:
            session = there.session("7-0")
            history: list[Any] = [{"role": "user", "content": "go"}]
            for _ in script:
                got = await events(there, "7-0", input=history, tools=[FIND], store=False)
                assert sum(event.type == "response.reasoning_text.delta" for event in got) > 1, "in pieces"
                for item in got[-1].response.output:
                    kept = item.model_dump(exclude_none=True)
                    if item.type == "reasoning" and sent_back == "encrypted":
                        kept.pop("content")
                    if item.type != "reasoning" or sent_back != "none":
                        history.append(kept)
                    if item.type == "function_call":
                        history.append({"type": "function_call_output", "call_id": item.call_id, "output": "ok"})
            response = got[-1].response
            assert [item.type for item in response.output] == ["reasoning", "message"]
            assert response.output[0].content[0].text == "So."
            assert response.usage.output_tokens_details.reasoning_tokens == len("<think>So.")
            rollout = session.rollout()
            assert rollout is not None and len(rollout.sequences) == 1

    in_time(test)
