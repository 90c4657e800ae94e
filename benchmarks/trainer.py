"""The cost of DeepSpeed and the output head: the trainer compared with a plain PyTorch loop.

    python benchmarks/trainer.py [--quick] [--zero-stage N] [--set KEY=VALUE ...]

Forward, backward and optimizer step over the same micro-batches of the quickstart's model, in turn, on one rank and one
thread. The plain loop computes logits for response tokens only, like the trainer, but all of them at once. memory.py
measures the trainer's memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import QUICKSTART, UNTRAINED, seconds_of

from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.sections import ExperimentSpec

ROWS, PROMPT, LONGEST = 256, 24, 192
"""Rollouts of an update, and tokens of a prompt and of the longest response."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute instead of several")
    parser.add_argument("--zero-stage", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the spec, for the trainer")
    options = parser.parse_args()
    overrides = [f"trainer.zero_stage={options.zero_stage}", *UNTRAINED, *options.set]
    with tempfile.TemporaryDirectory() as folder:
        measure_speed(spec_of(overrides), Path(folder), rounds=5 if options.quick else 20)


def spec_of(overrides: list[str]) -> ExperimentSpec:
    """The quickstart's spec; also sets this process up as a trainer's."""
    from asyncrl_cli.train.deepspeed_engine import trainer_environment

    spec = load_spec(QUICKSTART, overrides).spec
    os.environ.update(trainer_environment(spec))
    return spec


def start(spec: ExperimentSpec, folder: Path, joined: bool = False) -> Any:
    """A trainer's engine around the model in ``folder``, on one rank. ``joined``: this process has one already."""
    import socket

    import torch

    from asyncrl_cli.train import deepspeed_engine as ds

    torch.set_num_threads(1)
    if not joined:
        server = socket.create_server(("127.0.0.1", 0))
        gpu = spec.trainer.gpus_per_rank > 0
        ds.join_process_group(0, ranks=1, address="127.0.0.1", port=server.getsockname()[1], gpu=gpu, listener=server)
    return ds.start_engine(spec, str(folder))


def microbatches(spec: ExperimentSpec, lengths: list[int], vocabulary: int) -> list[Any]:
    """Ids and mask of random rows with these responses, split as the trainer does."""
    import torch

    from asyncrl_cli.train.packing import plan_microbatches

    generator = torch.Generator().manual_seed(0)
    totals = [PROMPT + length for length in lengths]
    made = []
    for rows in plan_microbatches(totals, spec.trainer.microbatch_tokens, 1, spec.trainer.packing)[0]:
        longest = max(totals[row] for row in rows)
        ids = torch.randint(3, vocabulary, (len(rows), longest), generator=generator)
        positions = torch.arange(longest)
        ends = torch.tensor([totals[row] for row in rows])
        made.append((ids, (positions >= PROMPT) & (positions < ends[:, None])))
    return made


def measure_speed(spec: ExperimentSpec, folder: Path, rounds: int) -> None:
    """Print response tokens per second of both, and the ratio of their medians."""
    import torch
    from transformers import AutoModelForCausalLM

    from asyncrl_cli.train.model.initial import build_initial_model
    from asyncrl_cli.train.nonfinite_guard import backward, step

    assert spec.model.init is not None
    build_initial_model(spec.model.init, spec.model.max_length, 0, folder)
    engine = start(spec, folder)
    lengths = np.random.default_rng(0).integers(8, LONGEST, ROWS).tolist()
    batches = microbatches(spec, lengths, vocabulary=95)
    tokens = sum(lengths)

    def trainer() -> None:
        for index, (ids, mask) in enumerate(batches):
            engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            backward(engine, -engine(ids, mask).sum() / tokens)
        step(engine)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.trainer.optimizer.learning_rate)

    def bare() -> None:
        for ids, mask in batches:
            hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[mask[:, 1:]]
            logits = model.lm_head(hidden)
            loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:][mask[:, 1:]], reduction="sum") / tokens
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.trainer.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    rates: dict[str, list[float]] = {"trainer": [], "bare": []}
    for round_ in range(rounds + 1):
        for name, update in (("trainer", trainer), ("bare", bare)):
            seconds = seconds_of(update)
            if round_:  # the first round is a warm-up
                rates[name].append(tokens / seconds)
    print(f"{len(batches)} micro-batches of {tokens} response tokens, {rounds} rounds, ZeRO {spec.trainer.zero_stage}")
    for name, found in rates.items():
        low, middle, high = (f"{value:,.0f}" for value in (min(found), statistics.median(found), max(found)))
        print(f"{name:>8}: {middle} response tokens/s (least {low}, most {high})")
    ratio = statistics.median(rates["bare"]) / statistics.median(rates["trainer"])
    print(f"the bare loop is {ratio:.3f} times as fast (1.25 at most is wanted)")


if __name__ == "__main__":
    main()
