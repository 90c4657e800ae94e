"""The effect of malicious requests on the driver and the gateway.

    python benchmarks/gateway_attacks.py [--mb N] [--at-once N] [--rounds N]

A gateway as in training, in a separate process, with a byte-level tokenizer and a chat template like Qwen3's; only the
tokens come from the driver instead of an engine. The attacks come over loopback from separate processes: connections
that send nothing, and for each kind of request several large ones at the same time, with a session's key. Meanwhile an
honest client of another session requests one reply after another. Three things are measured: the largest delay of the
driver's event loop, the growth of the gateway's memory, and how long the honest client waits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

MIB = 2**20
SILENT = 600
SILENT_S = 5.0
LOOK_S = 0.005
MAX_LENGTH = 32768
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tool(name: str, description: str = "") -> dict[str, Any]:
    """A tool's definition."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {}}}


def kinds(size: int) -> dict[str, dict[str, Any]]:
    """A request of each kind, of about ``size`` bytes."""
    text, hello = "word " * (size // 5), {"role": "user", "content": "hello"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": text})}}
    many = [tool(f"f{n}", "x" * max(0, size // 50_000 - 110)) for n in range(50_000)]
    return {
        "content": {"messages": [{"role": "user", "content": text}]},
        "a tool call's arguments": {"messages": [hello, {"role": "assistant", "content": "", "tool_calls": [call]}]},
        "a tool's description": {"messages": [hello], "tools": [tool("f", text)]},
        "50,000 tools": {"messages": [hello], "tools": many},
        "empty messages": {"messages": [{"role": "user", "content": ""}] * (size // 34)},
        "4,096 messages": {"messages": [{"role": "user", "content": "word " * (size // 4096 // 5 - 7)}] * 4096},
        "token ids": {"prompt": [1] * (size // 3)},
    }


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with long tokens, as in large vocabularies, and a model's config."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<|im_end|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator([" " * 128, *Path(__file__).read_text().splitlines()], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE)
    tokenizer.add_tokens(["-" * 128])
    tokenizer.save_pretrained(folder)
    Qwen3Config(vocab_size=len(tokenizer)).save_pretrained(folder)


# -- the clients


async def attack(url: str, key: str, kind: str, size: int, at_once: int) -> None:
    """Send requests of a kind at the same time, or open connections that send nothing; print the answers."""
    host, port = url.split("/")[2].split(":")
    if kind == "silent":
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(SILENT)]
        await asyncio.sleep(SILENT_S)
        for _, writer in silent:
            writer.close()
        print(f"{SILENT} connections")
        return
    body = kinds(size)[kind]
    path, data = "completions" if "prompt" in body else "chat/completions", json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as http:

        async def one() -> str:
            async with http.post(f"{url}/{path}", data=data) as answer:
                received = await answer.json()
                return f"{answer.status} {received.get('error', {}).get('code', '')}".strip()

        answers = await asyncio.gather(*(one() for _ in range(at_once)))
    print(f"{len(data) / MIB:.1f} MiB: {', '.join(sorted(set(answers)))}")


async def ask(url: str, key: str) -> None:
    """Request one reply after another, until killed; print the time of each in seconds."""
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        while True:
            started = time.perf_counter()
            body = {"messages": [{"role": "user", "content": "hello"}]}
            async with http.post(f"{url}/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            print(time.perf_counter() - started, flush=True)
            await asyncio.sleep(0.02)


@contextmanager
def client(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs this file, until the end of the block."""
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


# -- the driver


async def measure(folder: Path, mb: int, at_once: int, rounds: int) -> None:
    """Start the gateway, attack it, and print a table."""
    import psutil

    from asyncrl_cli.gateway.actor import SessionOpening
    from asyncrl_cli.gateway.session import SessionLimits
    from asyncrl_cli.orchestrator.actors import ActorFactory
    from asyncrl_cli.orchestrator.gateway_client import GatewayClient, setup_of
    from asyncrl_cli.records.generation import Rollout, RolloutRequest, Sampling
    from asyncrl_cli.spec.sections import ExperimentSpec
    from asyncrl_cli.system.supervised_actor import RestartBudget

    async def generate(request: RolloutRequest, _: Callable[..., None] | None = None) -> Rollout:
        return Rollout(
            rollout_id=request.rollout_id,
            prompt_ids=request.prompt_ids,
            ids=np.zeros(4, np.int32),
            logprobs=np.zeros(4, np.float32),
            versions=np.zeros(4, np.int32),
            text="",
            finish_reason="stop",
        )

    async def record(kind: str, part: str, message: str) -> None:
        raise RuntimeError(f"{part}: {message}")

    spec = ExperimentSpec.model_validate(
        {
            "name": "attacks",
            "model": {"path": str(folder), "max_length": MAX_LENGTH},
            "task": {"use": "chain_sum"},
            "rollout": {"gateway": {"max_body_mb": mb}},
            "stop": {"steps": 1},
        }
    )
    setup = setup_of(spec, str(folder), "attacks")
    factory = ActorFactory(spec, folder, folder, folder)
    gateway = GatewayClient(setup, factory.gateway, generate, RestartBudget(0, record, print))
    await gateway.start()
    process = psutil.Process(gateway._actor.pid)
    size = mb * MIB - 2 * MIB // 16
    print(
        "| attack | answers | driver's loop late by, ms | gateway's memory, MiB | honest client, median and most, ms |"
    )
    print("|-|-|-|-|-|")

    def ignore(_: Any) -> None:
        """Record nothing."""

    sampling, limits = Sampling(1.0, 64, seed=1), SessionLimits(MAX_LENGTH, 64)
    for kind in ("nothing", "silent", *kinds(MIB)) * rounds:
        openings = [SessionOpening(f"{kind}-{who}", f"{who}", sampling, limits) for who in ("bad", "good")]
        async with (
            gateway.session(openings[0], ignore, generate) as bad,
            gateway.session(openings[1], ignore, generate) as good,
        ):
            late, memory = [0.0], [process.memory_info().rss]
            watching = asyncio.create_task(_watch(late, memory, process))
            with client("ask", good.access.base_url, good.access.api_key) as asking:
                await asyncio.sleep(1.5)  # it has started
                del late[:], memory[1:]
                if kind == "nothing":
                    await asyncio.sleep(SILENT_S)
                    answers = ""
                else:
                    where = (bad.access.base_url, bad.access.api_key, kind, str(size), str(at_once))
                    with client("attack", *where) as attacking:
                        answers, _ = await asyncio.to_thread(attacking.communicate)
                asking.kill()
                waits = [float(line) * 1e3 for line in (asking.stdout or ()) if line.endswith("\n")]
            watching.cancel()
            honest = f"{np.median(waits):.0f}, {max(waits):.0f}"
            grown = f"{memory[0] / MIB:.0f} + {(max(memory) - memory[0]) / MIB:.0f}"
            print(f"| {kind} | {answers.strip()} | {max(late) * 1e3:.0f} | {grown} | {honest} |", flush=True)
    await gateway.stop()


async def _watch(late: list[float], memory: list[int], process: Any) -> None:
    while True:
        due = time.perf_counter() + LOOK_S
        await asyncio.sleep(LOOK_S)
        late.append(time.perf_counter() - due)
        memory.append(process.memory_info().rss)


def main() -> None:
    """Run as the driver, or as one of the clients."""
    if sys.argv[1:2] == ["attack"]:
        asyncio.run(attack(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6])))
        return
    if sys.argv[1:2] == ["ask"]:
        asyncio.run(ask(sys.argv[2], sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=16, help="rollout.gateway.max_body_mb; requests are as large")
    parser.add_argument("--at-once", type=int, default=10, help="large requests at once")
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of all attacks")
    arguments = parser.parse_args()

    import ray

    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        folder = Path(name)
        save_tokenizer(folder)
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
        try:
            asyncio.run(measure(folder, arguments.mb, arguments.at_once, arguments.rounds))
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
