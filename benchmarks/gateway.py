"""The time that the gateway adds to an engine's own time: HTTP, session, and the messages to and from the engine.

    python benchmarks/gateway.py [--concurrent N] [--requests N] [--width N] [--layers N]

Real vLLM on one thread with `asyncrl serve`, as users have it, by default with a tiny model, which gives the gateway
the highest load; clients in a separate process, with N simultaneous requests. Each request asks for 16 to 160 tokens
(the model almost never ends a reply earlier). Three times are measured for each request: the client's, from the first
byte sent to the last byte received; the driver's, from the session's request to its complete answer; and the engine's
own, in its process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import yaml

WARM_UP = 0.1
"""The fraction of the requests, at the beginning, that is not counted."""

SPEC: dict[str, Any] = {
    "name": "bench",
    "model": {
        "init": {
            "architecture": "qwen3",
            "config": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 32,
                "tie_word_embeddings": True,
            },
        },
        "max_length": 512,
    },
    "task": {"use": "chain_sum"},
    "rollout": {"max_running_rollouts": 256, "max_prompt_tokens": 64, "max_response_tokens": 192},
    "stop": {"steps": 1},
}


def spec_of(folder: Path, width: int, layers: int) -> dict[str, Any]:
    """The benchmark's spec, with a model of this hidden size and number of layers."""
    config = SPEC["model"]["init"]["config"]
    config |= {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    return {**SPEC, "runs_dir": str(folder)}


def serve(concurrent: int, requests: int, width: int, layers: int, folder: Path) -> None:
    """Start the server and the clients, and print the times."""
    from asyncrl_cli.orchestrator.interrupts import Interrupted
    from asyncrl_cli.orchestrator.serving import Address, served_folder
    from asyncrl_cli.orchestrator.serving import serve as run_server
    from asyncrl_cli.records.generation import Rollout, RolloutRequest
    from asyncrl_cli.rollout import client, worker
    from asyncrl_cli.spec.load import load_spec
    from asyncrl_cli.train.model.initial import prepare_model

    spec_file = folder / "spec.yaml"
    spec_file.write_text(yaml.safe_dump(spec_of(folder, width, layers)))
    spec = load_spec(spec_file).spec
    engine_log = folder / "engine.jsonl"

    class TimedWorker(worker.RolloutWorker):
        """Records the engine's time for each request, by its seed."""

        async def start(self, *arguments: Any) -> tuple[str, int | None]:
            started = await super().start(*arguments)
            generate, log = self._engine.generate, engine_log.open("a")

            async def timed(request: RolloutRequest) -> Rollout:
                begun = time.perf_counter()
                rollout = await generate(request)
                log.write(json.dumps([request.sampling.seed, time.perf_counter() - begun]) + "\n")
                log.flush()
                return rollout

            self._engine.generate = timed  # type: ignore[method-assign]
            return started

    worker.RolloutWorker = TimedWorker  # type: ignore[misc]
    in_driver: dict[int, float] = {}
    generate = client.GenerationClient.generate

    async def timed(self: client.GenerationClient, request: RolloutRequest, on_segments: Any = None) -> Rollout:
        started = time.perf_counter()
        rollout = await generate(self, request, on_segments)
        in_driver[request.sampling.seed or 0] = time.perf_counter() - started
        return rollout

    client.GenerationClient.generate = timed  # type: ignore[method-assign]
    asking: list[subprocess.Popen[bytes]] = []

    def ready(address: Address) -> None:
        command = [sys.executable, __file__, "--concurrent", str(concurrent), "--requests", str(requests)]
        settings = {
            "BENCH_URL": address.base_url,
            "BENCH_KEY": address.api_key,
            "BENCH_OUT": str(folder / "client.jsonl"),
        }
        asking.append(subprocess.Popen(command, env=os.environ | settings))
        asyncio.get_running_loop().create_task(_stop_after(asking[0]))

    model = prepare_model(spec)
    try:
        served = served_folder(spec, model, logs=folder, description=spec.name)
        run_server(served, ready=ready, check=lambda _: "", status=print, warn=print)
    except Interrupted:
        pass
    finally:
        for process in asking:
            process.kill()
    report(dict(_rows(folder / "client.jsonl")), in_driver, dict(_rows(engine_log)), concurrent)


async def _stop_after(asking: subprocess.Popen[bytes]) -> None:
    while asking.poll() is None:
        await asyncio.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)


def _rows(path: Path) -> list[tuple[int, float]]:
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]


async def ask(concurrent: int, requests: int) -> None:
    """The clients: this many connections, each with one request at a time."""
    url, key = urlsplit(os.environ["BENCH_URL"]), os.environ["BENCH_KEY"]
    lengths = random.Random(0)
    waiting = iter(range(1, requests + 1))
    head = f"POST {url.path}/completions HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {key}\r\nContent-Length: "
    times: list[tuple[int, float]] = []

    async def one() -> None:
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        for seed in waiting:
            body = json.dumps({"prompt": f"request {seed}:", "seed": seed, "max_tokens": lengths.randint(16, 160)})
            started = time.perf_counter()
            writer.write(f"{head}{len(body)}\r\n\r\n{body}".encode())
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            size = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(size)
            times.append((seed, time.perf_counter() - started))
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(concurrent)))
    seconds = time.perf_counter() - started
    print(f"{requests} requests in {seconds:.1f} s: {requests / seconds:.0f} a second")
    Path(os.environ["BENCH_OUT"]).write_text("".join(json.dumps(one) + "\n" for one in times))


def report(client: dict[int, float], driver: dict[int, float], engine: dict[int, float], concurrent: int) -> None:
    """Print a table, in milliseconds."""
    seeds = sorted(client)[int(len(client) * WARM_UP) :]
    rows = {
        "whole request, as its client has it": [client[seed] for seed in seeds],
        "the engine's own time": [engine[seed] for seed in seeds],
        "overhead": [client[seed] - engine[seed] for seed in seeds],
        "of it to the engine and back": [driver[seed] - engine[seed] for seed in seeds],
        "of it HTTP and session": [client[seed] - driver[seed] for seed in seeds],
    }
    print(f"| {concurrent} at a time | median ms | 99th percentile ms |\n|-|-|-|")
    for name, values in rows.items():
        median, late = np.percentile(np.array(values) * 1e3, [50, 99])
        print(f"| {name} | {median:.1f} | {late:.1f} |")


def main() -> None:
    """Run as the server, or, with its address, as its clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--width", type=int, default=64, help="the model's hidden size")
    parser.add_argument("--layers", type=int, default=2, help="the model's layers")
    arguments = parser.parse_args()
    if "BENCH_URL" in os.environ:
        asyncio.run(ask(arguments.concurrent, arguments.requests))
        return
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        serve(arguments.concurrent, arguments.requests, arguments.width, arguments.layers, Path(folder))


if __name__ == "__main__":
    main()
