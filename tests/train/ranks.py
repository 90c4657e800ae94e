"""Runs a program as several trainer ranks, without Ray.

Ranks are forked from one process that has made all imports, because imports take longer than most tests.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from functools import cache
from itertools import count
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from train_one import SPEC

from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.train.deepspeed_engine import trainer_environment

_PORTS = count(10_000 + os.getpid() % 1_000 * 20)
"""Below the kernel's ephemeral ports: it takes seconds until ranks listen."""
LIMIT_S = 240
"""Seconds that a rank may take."""
IMPORTED = (
    "deepspeed",
    "transformers.models.qwen3.modeling_qwen3",
    "asyncrl_cli.train.model.initial",
    "asyncrl_cli.train.step",
    "asyncrl_cli.train.worker",
)


BASE = ("trainer.ranks=1", "trainer.zero_stage=1", "trainer.optimizer.learning_rate=0.001", "stop.steps=2")


def train_ranks(folder: Path, *settings: Sequence[str]) -> list[dict[str, Any]]:
    """Weights and metrics after the steps of train_one.py, from rank 0, for each setting.

    The same processes train all settings, which have the same number of ranks: starting a process takes as long as
    training a setting.
    """
    folder.mkdir(exist_ok=True)
    words = [word for setting in settings for word in (",", *BASE, *setting)]
    run_ranks("train_one.py", folder, tuple(words[1:]))
    results: list[dict[str, Any]] = torch.load(folder / "rank-0.pt")
    return results


def assert_equal(other: dict[str, Any], plain: dict[str, Any], atol: float = 2e-5) -> None:
    """Compare weights and metrics, up to float32's rounding."""
    assert other["weights"].keys() == plain["weights"].keys()
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(other["weights"][name], weight, rtol=1e-4, atol=atol, msg=name)
    for name in ("train/loss", "train/gradient_norm", "correction/importance_mean", "engine/logprob_gap_max"):
        assert other["metrics"][name] == pytest.approx(plain["metrics"][name], rel=1e-4, abs=1e-6), name


def run_ranks(program: str, folder: Path, overrides: tuple[str, ...], *arguments: object) -> None:
    """Run `python PROGRAM FOLDER/rank-N.pt N PORT ARGUMENTS... OVERRIDES...` for every rank in the overrides.

    The program is in this folder. Fails with the output of the first rank that fails.
    """
    ranks = next(int(item.partition("=")[2]) for item in reversed(overrides) if item.startswith("trainer.ranks="))
    port = next(_PORTS)
    processes = {}
    for rank in range(ranks):
        log = folder / f"{program}-{rank}.log"
        command = [Path(__file__).with_name(program), folder / f"rank-{rank}.pt", rank, port, *arguments, *overrides]
        processes[log] = forked().Process(target=_run, args=(log, [str(part) for part in command]))
        processes[log].start()
    try:
        for log, process in processes.items():
            process.join(LIMIT_S)
            assert process.exitcode == 0, f"{process.exitcode}: {log.read_text()[-3000:]}"
    finally:
        for process in processes.values():
            process.kill()


@cache
def forked() -> ForkServerContext:
    """A context that forks processes after all imports, with a trainer's environment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with patch.dict(os.environ, trainer_environment(load_spec(SPEC).spec)):
        forkserver.ensure_running()
    return context


def _run(log: Path, command: list[str]) -> None:
    with log.open("wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    sys.path.insert(0, str(Path(command[0]).parent))
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
