"""The effect of rewards on the driver's event loop if the driver, or an actor, owns the worker processes.

    python benchmarks/user_code.py

64 responses of 4,000 characters are being scored at any time. Meanwhile a task repeatedly sleeps for 5 ms; the delay of
its wake-up is the loop's delay. In later rows one reward in ten hangs and is killed after a second; in the last row it
holds 1 GiB of memory.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.workers.actors import RewardActor
from asyncrl_cli.workers.scoring import Response

REWARD = """
import time

def reward(prompt, response):
    if prompt["uid"].endswith("hangs"):
        held = bytearray(prompt["held_mb"] * 2**20)
        time.sleep(60)
    return float(len(response))
"""
AT_ONCE = 64
TICK_S = 0.005
Score = Callable[[list[Response]], Awaitable[list[Scored | RewardFailure]]]


async def measure(score: Score | None, seconds: float, hangs: int = 0, held_mb: int = 0) -> str:
    """A row of the table: rewards per second, and delays of the loop in ms: median, 99th percentile, largest."""
    delays: list[float] = []
    count = 0
    end = time.perf_counter() + seconds

    async def tick() -> None:
        while (now := time.perf_counter()) < end:
            await asyncio.sleep(TICK_S)
            delays.append((time.perf_counter() - now - TICK_S) * 1e3)

    async def ask(number: int) -> None:
        nonlocal count
        assert score is not None
        while time.perf_counter() < end:
            number += AT_ONCE
            uid = f"{number}/hangs" if hangs and number % hangs == 0 else f"{number}"
            await score([(Prompt(uid, "?", {"held_mb": held_mb}), "x" * 4_000, True)])
            count += 1

    await asyncio.gather(tick(), *(ask(number) for number in range(AT_ONCE if score else 0)))
    delays.sort()
    rest = (statistics.median(delays), delays[int(len(delays) * 0.99)], delays[-1])
    return " | ".join([f"{count / seconds:,.0f}", *(f"{delay:.2f}" for delay in rest)])


async def main(seconds: float) -> None:
    """Print both tables."""
    import ray

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "reward_of_benchmark.py").write_text(REWARD)
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        print("| owner | hanging | rewards/s | delay, median ms | 99th percentile | largest |\n|-|-|-|-|-|-|")
        print(f"| none, no rewards | | {await measure(None, seconds)} |", flush=True)
        for hangs, held_mb in ((0, 0), (10, 0), (10, 1024)):
            load = f"1 in {hangs}, {held_mb:,} MiB" if hangs else "none"
            task = TaskSpec(use="reward_of_benchmark:reward", reward_workers=2, reward_timeout_s=1.0)
            settings = ("scorer", task, folder, folder)
            with patch("asyncrl_cli.workers.actors.redirect_output"):
                here: Any = RewardActor(*settings)
            await here.start()
            print(f"| the driver | {load} | {await measure(here.score, seconds, hangs, held_mb)} |")
            await here.stop()
            actor: Any = ray.remote(RewardActor).options(num_cpus=0).remote(*settings)
            await actor.start.remote()
            row = await measure(actor.score.remote, seconds, hangs, held_mb)
            print(f"| an actor | {load} | {row} |", flush=True)
            await actor.stop.remote()
            ray.kill(actor)
        ray.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row")
    asyncio.run(main(parser.parse_args(sys.argv[1:]).seconds))
