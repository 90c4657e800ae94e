"""The shards of all ranks together are the gathered weights, bit for bit, and no rank writes into another's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from shards_one import SETTINGS

from asyncrl_cli.weights.layout import shard_of

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module", params=[*(pytest.param(ranks, marks=pytest.mark.rotating) for ranks in (1, 2)), 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("shards")
    return run_ranks("shards_one", folder, (f"trainer.ranks={request.param}",))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_all_shards_together_are_the_gathered_weights(ranks: Any, setting: Any) -> None:
    _, _, full = ranks[0][setting]
    assert ("lm_head.weight" in full) == (not setting[4])
    assert any("lora" in name for name in full) == all("lora" in name for name in full) == (setting[3] == "adapter")
    for name, weight in full.items():
        joined = torch.full_like(weight.flatten(), torch.nan)
        for rank, saved in enumerate(ranks):
            memory, again, _ = saved[setting]
            begin, end = shard_of(weight.numel(), rank, len(ranks))
            own = memory[name].flatten()
            assert memory.keys() == full.keys()
            assert own[:begin].isnan().all()
            assert own[end:].isnan().all()
            assert torch.equal(again[name].flatten()[begin:end], own[begin:end])
            joined[begin:end] = own[begin:end]
        assert torch.equal(joined, weight.flatten()), name
