"""Shared prefixes in training: a step with `trainer.share_prefixes`, compared with one that computes every row alone.

    python benchmarks/shared_prefixes.py [--prompts 10 100 600 2000] [--responses 8] [--tokens 100] [--rounds 5]
    python benchmarks/shared_prefixes.py --device cuda --models 0.4B --dtype bfloat16 --groups 16
        --attention sdpa varlen flash_attention_4

Both train the same batches with the same engine, in turn, on one rank and one thread, at a rate that changes no weight.
A table for each model and attention has trained tokens per second (medians), their ratio, and the largest difference in
loss. A second is CPU time, and on a GPU the step's time after one step that is not counted. Flash attention packs rows
and shares no prefixes.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import UNTRAINED
from gpu_report.specs import MODEL
from gpu_report.steps import random_batch
from trainer import spec_of, start

from asyncrl_cli.records.training import TrainingBatch

MODELS: dict[str, dict[str, Any]] = {
    "quickstart": {},
    "9.5M": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1152},
    "0.4B": MODEL["cuda"],
}
"""Changes of the quickstart's model."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="*", type=int, default=[10, 100, 600, 2000], help="tokens of the prompt")
    parser.add_argument("--responses", type=int, default=8, help="rollouts of a group")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of a response, on average")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=["quickstart", "9.5M"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--attention", nargs="*", default=["sdpa"])
    parser.add_argument("--microbatch", type=int, default=8192, help="tokens of a micro-batch")
    options = parser.parse_args()
    for index, (name, attention) in enumerate(itertools.product(options.models, options.attention)):
        measure(name, attention, options=options, joined=index > 0)


def measure(name: str, attention: str, options: argparse.Namespace, joined: bool) -> None:
    """Print the table of one model with one ``attention``."""
    from asyncrl_cli.train.algorithms.objective import Objective
    from asyncrl_cli.train.model.initial import build_initial_model
    from asyncrl_cli.train.nonfinite_guard import SkipLimit
    from asyncrl_cli.train.precompute import Learner
    from asyncrl_cli.train.step import train_batch

    gpu = options.device == "cuda"
    changes = [*UNTRAINED, *(f"model.init.config.{key}={value}" for key, value in MODELS[name].items())]
    spec = spec_of(
        [*changes, "trainer.zero_stage=2", "model.max_length=4096", "stop.steps=100000",
         f"rollout.group_size={options.responses}", f"pipeline.groups_per_step={options.groups}",
         "rollout.max_response_tokens=256", f"trainer.tokens_per_microbatch={options.microbatch}",
         f"trainer.attention={attention}", f"trainer.dtype={options.dtype}", f"rollout.dtype={options.dtype}",
         *(["trainer.gpus_per_rank=1", "rollout.gpus_per_engine=1"] if gpu else []),
         "data.eval=null", "trainer.optimizer.learning_rate=1e-12"]
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        assert spec.model.init is not None
        build_initial_model(spec.model.init, spec.model.max_length, 0, Path(folder))
        engine = start(spec, Path(folder), joined)
    learner = Learner(spec, 0, Objective.of(spec.algorithm, Path(folder)), engine, SkipLimit(10))
    # Some attention shares no prefixes.
    ways = [False, True] if engine.module.shares_prefixes else [False]
    weights = sum(weight.numel() for weight in engine.module.parameters())
    print(f"\n{name}: {weights:,} weights, {options.dtype}, {attention}")
    print("| prompt | tokens/s, separate | shared | ratio | computed tokens | loss differs by |\n|-|-|-|-|-|-|")
    for prompt in options.prompts:
        rates: dict[bool, list[float]] = {False: [], True: []}
        losses: dict[bool, list[float]] = {False: [], True: []}
        computed: dict[bool, int] = {}
        for number in range(-1 if gpu else 0, options.rounds):
            batch = batch_of(options, prompt, max(number, 0))
            for shares in ways if number % 2 else ways[::-1]:
                engine.module.shares_prefixes = shares
                report = train_batch(learner, batch)
                if number < 0:  # compiles kernels
                    continue
                rates[shares].append(report.trained_tokens / (report.seconds if gpu else report.cpu_s))
                losses[shares].append(report.metrics["train/loss"])
                computed[shares] = report.computed_tokens
        separate = statistics.median(rates[False])
        if len(ways) < 2:
            print(f"| {prompt} | {separate:,.0f} | – | – | {computed[False]:,} | – |", flush=True)
            continue
        shared = statistics.median(rates[True])
        gap = max(abs(one - other) for one, other in zip(losses[False], losses[True], strict=True))
        print(
            f"| {prompt} | {separate:,.0f} | {shared:,.0f} | {shared / separate:.2f} "
            f"| {computed[False]:,} → {computed[True]:,} | {gap:.1e} |",
            flush=True,
        )


def batch_of(options: argparse.Namespace, prompt: int, seed: int) -> TrainingBatch:
    """Groups of random rollouts; lengths vary by a half."""
    random = np.random.default_rng(seed)
    shape = options.groups, options.responses
    lengths = random.integers(options.tokens // 2, options.tokens * 3 // 2 + 1, shape)
    return random_batch(lengths, prompt, seed=seed)


if __name__ == "__main__":
    main()
