"""Runs a program of this folder as several trainer ranks, without Ray.

A program is a module with a function ``main(rank, *arguments)``, which returns the result of one rank. Ranks are forked
from one process that has made all imports, because imports take longer than most tests.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import count, groupby
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.deepspeed_engine import join_process_group, trainer_environment

SPEC = Path(__file__).parents[1] / "fixtures/two_ranks.yaml"
REPLAY = "algorithm.router_replay=true"
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
    results: list[dict[str, Any]] = run_ranks("train_one", folder, tuple(words[1:]))[0]
    return results


def assert_equal_weights(other: dict[str, Any], plain: dict[str, Any], atol: float = 2e-5) -> None:
    assert other["weights"].keys() == plain["weights"].keys()
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(other["weights"][name], weight, rtol=1e-4, atol=atol, msg=name)


def assert_equal(other: dict[str, Any], plain: dict[str, Any], atol: float = 2e-5) -> None:
    """Compare weights and metrics, up to float32's rounding."""
    assert_equal_weights(other, plain, atol)
    for name in ("train/loss", "train/gradient_norm", "correction/importance_mean", "engine/logprob_gap_max"):
        assert other["metrics"][name] == pytest.approx(plain["metrics"][name], rel=1e-4, abs=1e-6), name


@dataclass(frozen=True)
class Rank:
    """One process of a program."""

    number: int
    port: int
    folder: Path
    specs: list[ExperimentSpec]
    """One for each group of overrides between commas. All have the same number of ranks."""

    @property
    def spec(self) -> ExperimentSpec:
        """The only spec."""
        (spec,) = self.specs
        return spec

    @property
    def out(self) -> Path:
        """The file with this rank's result. Programs add endings for more files."""
        return self.folder / f"rank-{self.number}.pt"

    def join(self) -> None:
        """Join the other ranks. Afterwards transformers saves models only on rank 0."""
        join_process_group(self.number, self.specs[0].trainer.ranks, "127.0.0.1", self.port, gpu=False)


def run_ranks(program: str, folder: Path, overrides: tuple[str, ...], *arguments: object) -> list[Any]:
    """Run a program for every rank in the overrides. Returns the ranks' results.

    Fails with the output of the first rank that fails.
    """
    ranks = next(int(item.partition("=")[2]) for item in reversed(overrides) if item.startswith("trainer.ranks="))
    port = next(_PORTS)
    processes = [
        forked().Process(target=_run, args=(program, folder, number, port, overrides, arguments))
        for number in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        for number, process in enumerate(processes):
            process.join(LIMIT_S)
            assert process.exitcode == 0, f"{process.exitcode}: {_log(folder, program, number).read_text()[-3000:]}"
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"rank-{number}.pt", weights_only=False) for number in range(ranks)]


@cache
def forked() -> ForkServerContext:
    """A context that forks processes after all imports, with a trainer's environment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with patch.dict(os.environ, trainer_environment(load_spec(SPEC).spec)):
        forkserver.ensure_running()
    return context


def _log(folder: Path, program: str, number: int) -> Path:
    return folder / f"{program}-{number}.log"


def _run(
    program: str, folder: Path, number: int, port: int, overrides: tuple[str, ...], arguments: tuple[object, ...]
) -> None:
    with _log(folder, program, number).open("wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    sys.path.insert(0, str(Path(__file__).parent))
    settings = [list(group) for is_comma, group in groupby(overrides, ",".__eq__) if not is_comma]
    rank = Rank(number, port, folder, [_loaded([f"runs_dir={folder}", *setting]) for setting in settings])
    os.environ.update(trainer_environment(rank.specs[0]))
    torch.set_num_threads(1)
    torch.save(import_module(program).main(rank, *arguments), rank.out)


def _loaded(overrides: list[str]) -> ExperimentSpec:
    """A spec. It may replay experts, which train_one.py draws: the rules allow that only with engines on GPUs."""
    spec = load_spec(SPEC, [override for override in overrides if override != REPLAY]).spec
    algorithm = spec.algorithm.model_copy(update={"router_replay": REPLAY in overrides})
    return spec.model_copy(update={"algorithm": algorithm})
