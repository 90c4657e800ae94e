"""The cost of one sampling step on a CPU engine: vLLM's generator per request, or sampling by seed and position.

    python benchmarks/sampling.py [--requests N]

Both are the last step of vLLM's sampler with the same random logits; they alternate on one thread. In an engine of
asyncrl the sampler also computes the log-probs of the distribution, which is the same work in both cases.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

ROUNDS = 15
VOCABULARIES = (512, 150_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64, help="requests of a step, each with a seed")
    requests = parser.parse_args().requests
    logging.disable(logging.WARNING)
    import torch

    torch.set_num_threads(1)
    print(f"{requests} requests; ms of CPU time a step, medians of {ROUNDS}")
    print(f"{'vocabulary':>10}  {'':15}{'generators':>12}{'by position':>13}")
    for vocabulary in VOCABULARIES:
        for name, mode in (("with log-probs", "processed_logprobs"), ("draw alone", "raw_logprobs")):
            logits = torch.randn(requests, vocabulary)
            before, after = steps_of(requests, mode)
            times = [(time_of(before, logits), time_of(after, logits)) for _ in range(ROUNDS)]
            old, new = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
            print(f"{vocabulary:>10,}  {name:15}{old:>12.3f}{new:>13.3f}")


def steps_of(requests: int, mode: str) -> tuple[Callable[[Any], object], Callable[[Any], object]]:
    """vLLM's last sampling step and asyncrl's; both are called with logits."""
    import torch
    from vllm.v1.sample.sampler import Sampler

    from asyncrl_cli.rollout.vllm_sampler import sample_by_position

    generators = {row: torch.Generator().manual_seed(row) for row in range(requests)}
    ours: Any = SimpleNamespace(
        sampler=Sampler(mode),
        input_batch=SimpleNamespace(sampling_metadata=object()),
        seq_lens=torch.arange(requests, dtype=torch.int32),
    )
    config: Any = SimpleNamespace(use_v2_model_runner=False)
    assert sample_by_position(ours, config), "vLLM has no kernel for it on this machine"
    theirs = Sampler(mode)

    def step(sampler: Any) -> Callable[[Any], object]:
        return lambda logits: sampler.topk_topp_sampler(logits, generators, None, None)

    return step(theirs), step(ours.sampler)


def time_of(step: Callable[[Any], object], logits: Any) -> float:
    """CPU time (s) of one step, as the mean over a few steps."""
    repeats: int = max(3, 2_000_000 // logits.numel())
    started = time.process_time()
    for _ in range(repeats):
        step(logits)
    return (time.process_time() - started) / repeats


if __name__ == "__main__":
    main()
