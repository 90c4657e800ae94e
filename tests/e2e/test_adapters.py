"""Adapters on a real vLLM engine: its tokens are those of the model into which they are merged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl_cli.records.generation import Rollout
from asyncrl_cli.train.model.lora import adapter_matrices, add_adapters, plain_weights
from asyncrl_cli.train.shards import adapter_layout
from asyncrl_cli.weights.layout import TensorSlot, size_of
from tests.e2e.test_weights import (
    TOLERANCE,
    Bench,
    check_request_after_update,
    check_tokens_in_a_crowd,
    crossing,
    gaps,
    has_crossed,
    started,
)

pytestmark = pytest.mark.stack

PROBE = (5, 9, 30, 31, 60, 22, 14)


class AdapterBench(Bench):
    """An engine that receives adapters; in ``models`` they are merged."""

    def make(self) -> Any:
        model = self._load()
        add_adapters(model, self._spec.model.lora, seed=0)
        return model

    def layout(self, model: Any) -> tuple[TensorSlot, ...]:
        return adapter_layout(model, torch.float32)

    def published(self, model: Any) -> dict[str, torch.Tensor]:
        return {f"{name.removesuffix('weight')}{kind}.weight": part for name, kind, part in adapter_matrices(model)}

    def merged(self, version: int) -> Any:
        """A model without adapters."""
        model = self._load()
        with torch.no_grad():
            model.load_state_dict(
                {weight.name: weight.merged() for weight in plain_weights(self.models[version])}, strict=False
            )
        return model


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as loops:
        yield loops.get_loop()


@pytest.fixture(scope="module")
def bench(loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterBench]:
    # A rank for which vLLM has no slots, and a scale that is not a power of two.
    lora = {"rank": 3, "alpha": 7.0, "serve": "adapter"}
    bench = started(loop, tmp_path_factory.mktemp("adapters"), AdapterBench, lora=lora)
    assert isinstance(bench, AdapterBench)
    yield bench
    bench.end()


def test_tokens_are_those_of_the_merged_weights(bench: AdapterBench, loop: asyncio.AbstractEventLoop) -> None:
    async def generate(version: int) -> Rollout:
        await bench.publish(version, "recompute")
        return await bench.generate([3, 40, 50], 24)

    for version in (1, 2):
        rollout = loop.run_until_complete(generate(version))
        bench.models[version] = bench.merged(version)
        assert gaps(bench, rollout, version).max() < TOLERANCE
    weights = sum(4 * parameter.numel() for parameter in bench.models[1].parameters())
    assert size_of(bench.slots) < weights / 10, "of a publish"


def test_rollouts_that_run_use_the_new_adapter_from_the_pause_on(
    bench: AdapterBench, loop: asyncio.AbstractEventLoop
) -> None:
    asyncio.set_event_loop(loop)
    rollouts = crossing(bench, 11, "recompute")
    assert any(map(has_crossed, rollouts))
    for rollout in rollouts:
        for version in (10, 11):
            assert gaps(bench, rollout, version).max(initial=0.0) < TOLERANCE


def test_the_prefix_cache_has_nothing_of_another_adapter(bench: AdapterBench, loop: asyncio.AbstractEventLoop) -> None:
    check_request_after_update(bench, loop, "keep", 21)


def test_the_probe_shows_an_engine_that_ignores_the_adapter(
    bench: AdapterBench, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncrl_cli.orchestrator.probe_check import ProbeCheck

    async def attest() -> np.ndarray:
        return (await bench.engine.attest(PROBE, 0.0)).probe_logprobs

    def expected(model: Any) -> np.ndarray:
        with torch.no_grad():
            logprobs = model(torch.tensor([PROBE])).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, torch.tensor(PROBE[1:])[:, None])[:, 0].numpy()

    loop.run_until_complete(bench.publish(30, "recompute"))
    probe, base = expected(bench.models[30]), expected(bench._load())
    check = ProbeCheck(bench._spec)
    assert not check.judge(loop.run_until_complete(attest()), probe, base=base)[1]
    monkeypatch.setattr(bench.engine, "_adapter", None)
    answer = loop.run_until_complete(attest())
    assert np.abs(answer - base).max() < TOLERANCE
    assert "without adapters" in check.judge(answer, probe, base=base)[1]


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_crowd(
    bench: AdapterBench, loop: asyncio.AbstractEventLoop
) -> None:
    check_tokens_in_a_crowd(bench, loop, 40)


def test_layers_that_vllm_would_ignore_are_named(
    bench: AdapterBench, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from asyncrl_cli.core.errors import ConfigError

    part = replace(bench.slots[0].parts[0], name="base_model.model.model.layers.0.mlp.no_such.lora_A.weight")
    slots = (replace(bench.slots[0], parts=(part,)), *bench.slots[1:])
    with pytest.raises(ConfigError, match=r"the adapter of model\.layers\.0\.mlp\.no_such"):
        loop.run_until_complete(bench.engine._prepare(50, bench.path, slots))
    assert bench.engine._layout == bench.slots
