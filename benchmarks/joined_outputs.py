"""The cost of vLLM's front end and core per token, with a record per token and with joined records (decision 0010).

    python benchmarks/joined_outputs.py [--requests N] [--repeats N]

One CPU engine serves the quickstart's model, changed never to end a greedy response. Streamed requests get a record for
each token, other requests get joined records; both alternate on the same engine. The CPU time of the two processes is
measured, because other work on the machine affects it less than wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from common import QUICKSTART, UNTRAINED, cpu_seconds, header, row

from asyncrl_cli.records.generation import RolloutRequest, Sampling
from asyncrl_cli.rollout.engine_settings import engine_environment
from asyncrl_cli.rollout.vllm_core import use_as_main
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.sections import ExperimentSpec

LENGTHS = (16, 256)
"""Tokens of each response."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64, help="requests that the engine runs at a time")
    parser.add_argument(
        "--repeats", type=int, default=5, help="repetitions of each measurement, of which the median is shown"
    )
    options = parser.parse_args()
    changes = [f"rollout.max_running_rollouts={options.requests}", f"model.max_length={max(LENGTHS) + 64}"]
    changes += [f"rollout.max_response_tokens={max(LENGTHS)}", "rollout.max_prompt_tokens=16"]
    spec = load_spec(QUICKSTART, [*UNTRAINED, *changes]).spec
    os.environ.update(engine_environment(spec))
    use_as_main()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        asyncio.run(measure(spec, folder, options.requests, options.repeats))


async def measure(spec: ExperimentSpec, folder: str, requests: int, repeats: int) -> None:
    """Print microseconds per token of both processes, by length and kind of records."""
    from asyncrl_cli.rollout.engine import Engine

    make_model(spec, folder)
    engine = Engine(spec, folder, own_weights=True)
    try:
        await engine.serve_own(0)
        (core,) = (psutil.Process(child.pid) for child in multiprocessing.active_children())
        print(f"{requests} requests at a time; µs per token, medians of {repeats}")
        print(header("tokens of a response", "records", "front end, CPU", "core, CPU", "wall"))
        for length in LENGTHS:
            found: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}
            for _ in range(repeats + 1):  # the first round is not counted
                for streamed, rounds in found.items():
                    rounds.append(await cost(engine, core, requests, length, streamed))
            for streamed, rounds in found.items():
                front, inside, wall = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
                name = "each token" if streamed else "joined"
                print(row(f"{length}", name, f"{front:.1f}", f"{inside:.1f}", f"{wall:.1f}"), flush=True)
    finally:
        engine.shutdown()


def make_model(spec: ExperimentSpec, folder: str) -> None:
    """The quickstart's model with random weights, which never prefers its end token."""
    import torch
    from transformers import AutoModelForCausalLM

    from asyncrl_cli.train.model.initial import build_initial_model

    assert spec.model.init is not None
    build_initial_model(spec.model.init, spec.model.max_length, spec.seed, Path(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[model.config.eos_token_id] = 0.0  # also used by the output layer
    model.save_pretrained(folder)


async def cost(engine: Any, core: psutil.Process, requests: int, length: int, streamed: bool) -> tuple[float, ...]:
    """Microseconds per token of ``4 * requests`` responses: CPU time of this process and of the core, and wall time."""
    asked = [
        RolloutRequest(f"{number}", (3 + number % 32, 40, 50), Sampling(0.0, length), streamed=streamed)
        for number in range(4 * requests)
    ]
    before = time.process_time(), cpu_seconds(core), time.perf_counter()
    rollouts = await asyncio.gather(*(engine.generate(one) for one in asked))
    after = time.process_time(), cpu_seconds(core), time.perf_counter()
    tokens = sum(len(rollout.ids) for rollout in rollouts)
    assert tokens == 4 * requests * length
    return tuple(1e6 * (end - begin) / tokens for begin, end in zip(before, after, strict=True))


if __name__ == "__main__":
    main()
