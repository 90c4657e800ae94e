"""An engine with many open requests of equal length, compared with bare vLLM, and with a record for each token.

    python -m gpu_report.engine_full DEVICE asyncrl|vllm FOLDER SETTINGS      one of the engines, in its own process

Both have the same arguments, the same model with random weights and the same requests, and there is no trainer. So the
difference is the cost of our front end, sampler and joined records (decision 0010).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from gpu_report.report import OK, Row
from gpu_report.runs import Bench
from gpu_report.specs import alone, qwen_spec, spec_of, timed_spec

REQUESTS = {"cuda": (64, 256, 512, 1024), "cpu": (16, 64)}
TOKENS = {"cuda": 256, "cpu": 32}
"""Tokens of each response."""
PROMPT_IDS = tuple(range(3, 19))
ROUNDS = 5
"""Responses of each open request; the first one is not counted."""
OURS, EACH_TOKEN, BARE = "asyncrl", "asyncrl, a record for each token", "vLLM"


def small_model(bench: Bench) -> dict[str, Any]:
    """Engines with the model of the timed runs."""
    return compare_engines(bench, timed_spec(bench.device, "async"))


def qwen(bench: Bench) -> dict[str, Any]:
    """Engines with the shape of Qwen3-4B."""
    return compare_engines(bench, qwen_spec(bench.device, bench.out / "qwen"))


def compare_engines(bench: Bench, settings: dict[str, Any]) -> dict[str, Any]:
    """Report each engine and number of requests as a case; returns our rates as shares of bare vLLM's."""
    settings = alone(settings, bench.device)
    settings["model"]["max_length"] = len(PROMPT_IDS) + TOKENS[bench.device]
    settings["rollout"] |= {"max_response_tokens": TOKENS[bench.device], "max_prompt_tokens": len(PROMPT_IDS)}
    settings["rollout"]["max_running_rollouts"] = max(REQUESTS[bench.device])
    rates: dict[tuple[str, int], float] = {}
    for engine in ("asyncrl", "vllm"):
        folder = bench.out / "models" / f"{bench.part}-{engine}"
        arguments = (engine, str(folder), json.dumps(settings))
        command = [sys.executable, "-W", "ignore", "-m", "gpu_report.engine_full", bench.device, *arguments]
        folder.mkdir(parents=True)
        with (folder / "errors.log").open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):  # vLLM prints to the same output
                figures = json.loads(line)
                name, requests, seconds = figures.pop("engine"), figures.pop("requests"), figures.pop("seconds")
                rates[name, requests] = figures["tokens/s"]
                bench.add(Row(bench.part, f"{requests} requests, {name}", OK, seconds, figures))
        if process.wait():
            last_lines = (folder / "errors.log").read_text().splitlines()[-12:]
            raise RuntimeError(f"{engine} ended with {process.returncode}: " + "\n".join(last_lines))
    return {
        f"{requests} requests, share of bare vLLM": {
            name: rates[name, requests] / rates[BARE, requests] for name in (OURS, EACH_TOKEN)
        }
        for requests in REQUESTS[bench.device]
    }


Generate = Callable[[str], Awaitable[int]]
"""Generate the response to a request with this id; returns its tokens."""


async def measure(device: str, engine: str, folder: Path, settings: dict[str, Any]) -> None:
    """Start an engine, and print a line of JSON for each number of open requests."""
    from asyncrl_cli.train.model.initial import write_model_stub

    spec = spec_of(settings)
    assert spec.model.init is not None
    write_model_stub(spec.model.init, spec.model.max_length, folder)
    _never_end()
    start = our_engine if engine == "asyncrl" else bare_vllm
    async for name, generate in start(spec, folder, TOKENS[device]):
        for requests in REQUESTS[device]:
            figures = await rate(generate, requests, prefix=f"{name}-{requests}")
            print(json.dumps({"engine": name, "requests": requests, **figures}), flush=True)


def _never_end() -> None:
    """Make all requests ignore the end token: responses must have equal lengths."""
    import vllm

    vllm.SamplingParams = partial(vllm.SamplingParams, ignore_eos=True)


async def our_engine(spec: Any, folder: Path, tokens: int) -> AsyncIterator[tuple[str, Generate]]:
    """An engine as in a run, with joined records, then with a record for each token."""
    from asyncrl_cli.records.generation import RolloutRequest, Sampling
    from asyncrl_cli.rollout.engine import Engine
    from asyncrl_cli.rollout.vllm_core import use_as_main

    use_as_main()
    engine = Engine(spec, str(folder))  # vLLM makes random weights
    try:
        await engine.serve_own(0)

        async def generate(request_id: str, streamed: bool) -> int:
            sampling = Sampling(1.0, tokens, seed=hash(request_id) % 2**31)
            rollout = await engine.generate(RolloutRequest(request_id, PROMPT_IDS, sampling, streamed=streamed))
            return len(rollout.ids)

        yield OURS, partial(generate, streamed=False)
        yield EACH_TOKEN, partial(generate, streamed=True)
    finally:
        engine.shutdown()


async def bare_vllm(spec: Any, folder: Path, tokens: int) -> AsyncIterator[tuple[str, Generate]]:
    """vLLM's own front end and core, with the arguments of our engine."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from asyncrl_cli.rollout.engine_settings import engine_args

    engine = AsyncLLM.from_engine_args(engine_args(spec, str(folder), "dummy"))
    params = SamplingParams(
        max_tokens=tokens,
        temperature=1.0,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    async def generate(request_id: str) -> int:
        async for output in engine.generate(tokens_input(list(PROMPT_IDS)), params, request_id=request_id):
            final_output = output
        return len(final_output.outputs[0].token_ids)

    try:
        yield BARE, generate
    finally:
        engine.shutdown()


async def rate(generate: Generate, requests: int, prefix: str) -> dict[str, float]:
    """Keep ``requests`` open requests, each followed by the next one; returns the speed after the first of each."""
    request_s = 0.0

    async def generate_in_turn(index: int, first_round: int, rounds: int) -> int:
        nonlocal request_s
        token_count = 0
        for round_index in range(first_round, first_round + rounds):
            started = time.perf_counter()
            token_count += await generate(f"{prefix}-{index}-{round_index}")
            request_s += time.perf_counter() - started
        return token_count

    await asyncio.gather(*(generate_in_turn(index, 0, 1) for index in range(requests)))
    request_s, started = 0.0, time.perf_counter()
    counts = await asyncio.gather(*(generate_in_turn(index, 1, ROUNDS - 1) for index in range(requests)))
    seconds = time.perf_counter() - started
    concurrency = request_s / seconds
    return {
        "tokens/s": sum(counts) / seconds,
        "ms of a decode step": 1000 * concurrency * seconds / sum(counts),
        "mean concurrency": concurrency,
        "seconds": seconds,
    }


if __name__ == "__main__":
    from asyncrl_cli.rollout.engine_settings import engine_environment

    run_settings = json.loads(sys.argv[4])
    os.environ.update(engine_environment(spec_of(run_settings)))
    asyncio.run(measure(sys.argv[1], sys.argv[2], Path(sys.argv[3]), run_settings))
