"""`asyncrl serve` as people start it: real vLLM behind it, OpenAI's client before it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from ..conftest import Runs, until
from ..faults.parts import processes_of_part
from ..served import logprobs_of, serving

pytestmark = pytest.mark.stack

TINY = {
    "architecture": "qwen3",
    "config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    },
}


def test_a_specs_model_is_served_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    with serving(runs, runs.write_spec(model={"init": TINY, "warm_start": None, "max_length": 256})) as server:
        client = server.client()
        assert [model.id for model in client.models.list()] == ["spell"]
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
        cold = [client.chat.completions.create(**asked, temperature=0).choices[0].message.content for _ in range(2)]
        assert cold[0] == cold[1]
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

        assert asyncio.run(many()) == texts[:2] * 100, "more than the engine runs at once, and each as if alone"
        (gateway,) = processes_of_part(server.mark, "gateway")
        os.kill(gateway, signal.SIGKILL)

        def answers() -> bool:
            try:
                return client.chat.completions.create(**asked, seed=1).choices[0].message.content == texts[0]
            except openai.APIConnectionError:
                return False

        until(answers, "another gateway at the same address, under the same key", 120)
        assert server.end(signal.SIGINT) == 130


def test_models_that_cannot_be_served_are_refused_with_the_reason(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    spec = runs.write_spec(model={"init": TINY, "warm_start": None})
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = runs.run("serve", spec, "--port", str(taken.getsockname()[1]))
    assert ended.code == 1
    assert "rollout.gateway.port" in ended.err
    assert "Traceback" not in ended.out + ended.err
