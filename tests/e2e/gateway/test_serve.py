"""`asyncrl serve` as people start it: real vLLM behind it, OpenAI's client before it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from ..conftest import Runs, mark_of, processes_of, until
from ..faults.parts import processes_of_part

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


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    process: subprocess.Popen[str]
    base_url: str
    api_key: str
    model: str
    mark: str

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.base_url, api_key=self.api_key, max_retries=0)

    def end(self, number: int) -> int:
        """Send a signal; returns the exit code when the process and all others of it are gone."""
        self.process.send_signal(number)
        self.process.communicate(timeout=60)
        until(lambda: not processes_of(self.mark), "the server's processes to end", 60)
        return self.process.returncode


@contextmanager
def serving(runs: Runs, *arguments: str | Path) -> Iterator[Server]:
    process = runs.start("serve", *arguments, "--json")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield Server(process, **json.loads(line), mark=mark_of(process.pid))
    finally:
        process.kill()
        process.communicate()


def logprobs_of(folder: Path, prompt_ids: list[int], token_ids: list[int]) -> list[float]:
    """The log-probs of a text by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt_ids, *token_ids]])).logits[0]
    values = logits.log_softmax(-1)[len(prompt_ids) - 1 : -1].gather(1, torch.tensor(token_ids)[:, None])
    return [float(value) for value in values[:, 0]]


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


def test_a_runs_model_is_served_and_a_kill_leaves_nothing(shared_runs: Runs) -> None:
    run = shared_runs.train(checkpoints={"every": 1}, stop={"steps": 2})
    exported = run / "exported"
    assert shared_runs.run("checkpoint", "export", run, "--step", "1", "--to", exported).code == 0
    for arguments, folder in ((("--step", "1"), exported), ((), run / "model")):
        with serving(shared_runs, run, *arguments) as server:
            assert server.model == run.name
            ids: Any = {"return_token_ids": True}
            (choice,) = (
                server.client()
                .completions.create(
                    model=server.model, prompt="abc=", max_tokens=20, seed=3, logprobs=0, extra_body=ids
                )
                .choices
            )
            theirs: Any = choice
            expected = logprobs_of(folder, theirs.prompt_token_ids, theirs.token_ids)
            assert choice.logprobs is not None
            torch.testing.assert_close(choice.logprobs.token_logprobs, expected, atol=1e-4, rtol=0)
            server.end(signal.SIGKILL)


def test_models_that_cannot_be_served_are_refused_with_the_reason(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    spec = runs.write_spec(model={"init": TINY, "warm_start": None})
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = runs.run("serve", spec, "--port", str(taken.getsockname()[1]))
    assert ended.code == 1
    assert "rollout.gateway.port" in ended.err
    assert "Traceback" not in ended.out + ended.err
