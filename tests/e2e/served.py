"""`asyncrl serve` for tests: a running server, and log-probs of the same model by transformers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
import torch

from tests.e2e.conftest import Runs, mark_of, processes_of, until


@dataclass(frozen=True)
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    base_url: str
    api_key: str
    model: str
    mark: str

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.base_url, api_key=self.api_key, max_retries=0)

    def end(self, number: int) -> int:
        """Send a signal; returns the exit code once the server and all its other processes have ended."""
        self.process.send_signal(number)
        self.process.communicate(timeout=120)
        until(lambda: not processes_of(self.mark), "the server's processes to end", 120)
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
    """The log-probs of a text, computed by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt_ids, *token_ids]])).logits[0]
    values = logits.log_softmax(-1)[len(prompt_ids) - 1 : -1].gather(1, torch.tensor(token_ids)[:, None])
    return [float(value) for value in values[:, 0]]
