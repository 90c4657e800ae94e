"""Rare cases of training that a run meets only when a rank has few or no rows: none may fail on a GPU.

python -m gpu_report.edges RANK PORT FOLDER SETTINGS      one of the ranks of ``two_ranks``
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gpu_report.report import FAILED, rows_of
from gpu_report.runs import LOOK_S, Bench, last_lines
from gpu_report.specs import alone, spec_of, timed_spec
from gpu_report.steps import learner, prepare, random_batch

ATTENTIONS = ("sdpa", "varlen", "flash_attention_4")
LENGTHS = (14, 12, 10)
"""Tokens of three responses, each in its own micro-batch: the second of two ranks has an empty one."""
RANKS = 2


def edges(bench: Bench) -> dict[str, Any]:
    """The output head without positions, a micro-batch of two tokens, and two ranks that talk through gloo.

    Raises ``RuntimeError`` if a case failed. On one GPU both ranks use it, which NCCL refuses.
    """
    settings = alone(timed_spec(bench.device, "async"), bench.device)
    settings["model"]["init"]["config"] |= {"num_hidden_layers": 2}
    folder = bench.out / "models" / bench.part
    prepare(settings, bench.device, folder)
    bench.case("output head without positions", partial(empty_head, bench.device))
    for attention in ATTENTIONS:
        measure = partial(two_tokens, settings, folder, f"trainer.attention={attention}")
        bench.case(f"micro-batch of two tokens, {attention}", measure)
    bench.case("two ranks through gloo", partial(two_ranks, settings, folder))
    failures = [row.case for row in rows_of(bench.csv) if row.part == bench.part and row.result == FAILED]
    if failures:
        raise RuntimeError(f"failed: {'; '.join(failures)}")
    return {}


def empty_head(device: str) -> dict[str, Any]:
    """Both passes of the output head without positions; its gradient must be zero."""
    import torch

    from asyncrl_cli.train.model.chunked_logprobs import chunked_logprobs

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer = torch.nn.Linear(64, 1000, bias=False, device=device, dtype=dtype)
    hidden = torch.zeros(0, 64, device=device, dtype=dtype, requires_grad=True)
    targets = torch.zeros(0, device=device, dtype=torch.int64)
    logprobs, _ = chunked_logprobs(layer, hidden, targets, 1.0, entropy="measure")
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    largest = 0.0 if layer.weight.grad is None else float(layer.weight.grad.abs().max())
    if largest != 0:  # also NaN
        raise RuntimeError(f"the gradient without positions has a value of {largest}")
    return {"largest gradient": largest}


def two_tokens(settings: dict[str, Any], folder: Path, change: str) -> dict[str, Any]:
    """An update from the row of an empty micro-batch; its gradient must be zero."""
    from asyncrl_cli.train.model.pass_layout import moved
    from asyncrl_cli.train.nonfinite_guard import backward, step
    from asyncrl_cli.train.packing import pad_rows

    with learner(settings, folder, (change,)) as rank:
        row = moved(pad_rows([]), rank.engine.device)
        logprobs, _ = rank.engine(row.input_ids, row.response_mask, "measure", **row.policy_arguments)
        rank.engine.set_gradient_accumulation_boundary(True)
        backward(rank.engine, logprobs.sum())
        norm = step(rank.engine).norm
        attention = rank.engine.module.model.config._attn_implementation
    if norm != 0:
        raise RuntimeError(f"the gradient has a norm of {norm}")
    return {"gradient norm": norm, "attention": attention}


def two_ranks(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A step of two ranks on one device; both must report the same loss."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "gpu_report.edges"]
    logs = [folder / f"rank-{rank}.log" for rank in range(RANKS)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            arguments = [str(rank), str(port), str(folder), json.dumps(settings)]
            processes.append(subprocess.Popen([*command, *arguments], stdout=output, stderr=output))
    try:
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            time.sleep(LOOK_S)
    finally:
        for process in processes:
            process.kill()
    for log, code in zip(logs, codes, strict=True):
        if code:
            raise RuntimeError(f"{log.stem} ended with {code}: {last_lines(log.read_text(), '')}")
    losses = [json.loads(log.read_text().splitlines()[-1])["loss"] for log in logs]
    if losses[0] != losses[1]:
        raise RuntimeError(f"the ranks have unequal losses: {losses}")
    return {"loss": losses[0]}


def run_rank(rank: int, port: int, folder: Path, settings: dict[str, Any]) -> None:
    """Train a step as one of the ranks, and print its loss."""
    from asyncrl_cli.train.algorithms.objective import Objective
    from asyncrl_cli.train.deepspeed_engine import join_process_group, start_engine
    from asyncrl_cli.train.nonfinite_guard import SkipLimit
    from asyncrl_cli.train.precompute import Learner
    from asyncrl_cli.train.step import train_batch

    changes = (f"trainer.ranks={RANKS}", "trainer.zero_stage=2", f"rollout.group_size={len(LENGTHS)}")
    spec = spec_of(settings, *changes, "trainer.tokens_per_microbatch=16", "trainer.share_prefixes=false")
    listener = socket.create_server(("127.0.0.1", port)) if rank == 0 else None
    join_process_group(rank, RANKS, "127.0.0.1", port, gpu=False, listener=listener)
    engine = start_engine(spec, str(folder))
    learner = Learner(spec, rank, Objective.of(spec.algorithm, folder), engine, SkipLimit(1))
    report = train_batch(learner, random_batch(np.array([LENGTHS]), prompt=4))
    print(json.dumps({"loss": report.metrics["train/loss"]}), flush=True)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
