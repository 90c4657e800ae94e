"""A step that takes longer than ``pipeline.stall_minutes`` continues while its ranks finish micro-batches."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from ranks import SPEC
from train_one import batch

from asyncrl_cli.orchestrator.actors import ActorFactory
from asyncrl_cli.orchestrator.cluster import Actors, ray_cluster
from asyncrl_cli.orchestrator.watchdog import DRIVER, Wait, Watchdog
from asyncrl_cli.records.training import StepReport
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.sections import ExperimentSpec

LIMIT_S = 3.0
SLOW_LOSS = """
import time

import torch
from asyncrl_cli.train.algorithms.policy_loss import TokenLosses

def loss(logprobs, proximal, advantages, mask, settings):
    time.sleep(0.6)
    return TokenLosses(-advantages * logprobs, torch.zeros_like(mask), torch.zeros_like(mask))
"""


async def train(spec: ExperimentSpec, folder: Path) -> StepReport:
    async def record(wait: Wait) -> None:
        pytest.fail(str(wait))

    watchdog = Watchdog(LIMIT_S, pytest.fail, record)
    factory = ActorFactory(spec, folder, folder)
    ranks = factory.ranks(LIMIT_S, print)
    await ranks.preload()
    await ranks.prepare_model()
    await ranks.start(None)
    watching = asyncio.create_task(watchdog.watch())
    with watchdog.waiting(DRIVER, "a slow step") as wait:
        report = await ranks.train_step(batch(0, 4), wait.progress)
    assert not watching.done(), "the watchdog ended the run"
    watching.cancel()
    return report


@pytest.mark.stack
def test_a_step_longer_than_the_limit_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_LOSS)
    overrides = [
        f"runs_dir={tmp_path}",
        "algorithm.loss=slow:loss",
        "trainer.ranks=1",
        "trainer.tokens_per_microbatch=128",
        "trainer.share_prefixes=false",
    ]
    spec = load_spec(SPEC, overrides).spec
    with ray_cluster(spec, tmp_path, Actors(0, 1)):
        report = asyncio.run(train(spec, tmp_path))
    assert report.seconds > LIMIT_S
