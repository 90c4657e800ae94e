"""`asyncrl serve` as users start it, with real vLLM and OpenAI's client."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import torch

from tests.small_models import UNTRAINED

from ..conftest import Runs, until
from ..faults.parts import processes_of_part
from ..served import Server, logprobs_of, serving

pytestmark = pytest.mark.stack


def test_a_specs_model_is_served_and_ctrl_c_ends_it(runs: Runs, tmp_path: Path) -> None:
    with serving(runs, runs.write_spec(model=UNTRAINED | {"max_length": 256})) as server:
        client = server.client()
        assert [model.id for model in client.models.list()] == ["sums"]
        ids: Any = {"return_token_ids": True}
        (choice,) = client.completions.create(
            model=server.model, prompt="spell: abc", max_tokens=40, seed=3, logprobs=0, extra_body=ids
        ).choices
        (folder,) = (tmp_path / "models").iterdir()
        theirs: Any = choice
        expected = logprobs_of(folder, theirs.prompt_token_ids, theirs.token_ids)
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert len(expected) > 1
        torch.testing.assert_close(choice.logprobs.token_logprobs, expected, atol=1e-4, rtol=0)

        asked: Any = {"model": server.model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 30}
        texts = [client.chat.completions.create(**asked, seed=seed).choices[0].message.content for seed in (1, 2, 1)]
        assert texts[0] == texts[2] != texts[1]
        pieces = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(**asked, seed=1, stream=True)
        ]
        assert "".join(pieces) == texts[0]
        _responses_are_those_of_chat(client, server.model, texts[0])
        cold = [client.chat.completions.create(**asked, temperature=0).choices[0].message.content for _ in range(2)]
        assert cold[0] == cold[1]
        _messages_are_those_of_chat(server, asked["messages"], cold[0])
        extreme = [2**63 - 1, -(2**63), -1, 0]
        for seed in extreme:
            client.completions.create(model=server.model, prompt="x", max_tokens=4, seed=seed, n=2)
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            client.completions.create(model=server.model, prompt="x" * 300)

        async def many() -> list[str]:
            limits = httpx.Limits(max_connections=None)
            async with (
                httpx.AsyncClient(limits=limits) as http,
                openai.AsyncOpenAI(
                    base_url=server.base_url, api_key=server.api_key, http_client=http, max_retries=0
                ) as there,
            ):
                answers = (there.chat.completions.create(**asked, seed=seed % 2 + 1) for seed in range(200))
                return [answer.choices[0].message.content or "" for answer in await asyncio.gather(*answers)]

        assert asyncio.run(many()) == texts[:2] * 100, (
            "more requests than the engine runs at once, each answered as if it were alone"
        )
        (gateway,) = processes_of_part(server.mark, "gateway")
        os.kill(gateway, signal.SIGKILL)

        def answers() -> bool:
            try:
                return client.chat.completions.create(**asked, seed=1).choices[0].message.content == texts[0]
            except openai.APIConnectionError:
                return False

        until(answers, "another gateway at the same address, under the same key", 120)
        assert server.end(signal.SIGINT) == 130


def _responses_are_those_of_chat(client: openai.OpenAI, model: str, text: str | None) -> None:
    """The same conversation over `/v1/responses`: the same text, complete, streamed, and continued by its id."""
    seeded: Any = {"seed": 1}
    asked: Any = {"model": model, "input": "hello", "max_output_tokens": 30, "extra_body": seeded}
    response = client.responses.create(**asked)
    assert response.output_text == text
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text
    assert response.usage is not None
    assert response.usage.output_tokens <= 30
    ids: Any = seeded | {"return_token_ids": True}
    second = client.responses.create(
        model=model, input="again", max_output_tokens=5, previous_response_id=response.id, extra_body=ids
    )
    history: Any = [{"role": "user", "content": "hello"}, *response.output, {"role": "user", "content": "again"}]
    same = client.responses.create(model=model, input=history, max_output_tokens=5, extra_body=ids)
    first_ids, same_ids = (one.prompt_token_ids for one in (second, same))
    assert first_ids == same_ids
    assert second.output_text == same.output_text


def _messages_are_those_of_chat(server: Server, messages: Any, text: str | None) -> None:
    """The same conversation over `/v1/messages`: the same text, complete and streamed, and its tokens counted."""
    base_url = server.base_url.removesuffix("/v1")
    client = anthropic.Anthropic(base_url=base_url, api_key=server.api_key, max_retries=0)
    asked: Any = {"model": server.model, "messages": messages, "max_tokens": 30, "extra_body": {"temperature": 0}}
    answer = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = "".join(stream.text_stream)
        last = stream.get_final_message()
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == streamed == text
    assert (last.stop_reason, last.usage) == (answer.stop_reason, answer.usage)
    assert client.messages.count_tokens(model=server.model, messages=messages).input_tokens == answer.usage.input_tokens
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**(asked | {"messages": [{"role": "user", "content": "x" * 300}]}))
