"""Four real gloo ranks that divide experts with DeepSpeed's AutoEP have the same results as one process: with the
routers' own experts and with recorded ones, and where ranks also share sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from experts_one import SETTINGS
from ranks import run_ranks

from asyncrl_cli.spec.sections import TrainerSpec
from asyncrl_cli.train.model.expert_parallel import ExpertError, check_experts
from asyncrl_cli.weights.layout import shard_of

RANKS = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("experts")
    return run_ranks("experts_one", folder, (f"trainer.ranks={RANKS}", "trainer.optimizer.learning_rate=0.001"))


@pytest.mark.stack
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_divided_experts_train_to_one_processs_weights(results: Any, setting: tuple[str, str]) -> None:
    one = results[0]["by hand", *setting]
    for number, rank in enumerate(results):
        group = number // SETTINGS[setting].get("sequence_parallel", 1)
        torch.testing.assert_close(rank[setting]["scored"], one["scored"][group], rtol=0, atol=1e-5)
        assert rank[setting]["norms"] == pytest.approx(one["norms"], rel=1e-5)
        full = rank[setting]["full"]
        assert full.keys() == one["full"].keys(), "the names of the transformers model"
        for name, weight in one["full"].items():
            # If a gradient is only a rounding error, Adam still makes a full step: single weights may differ by more.
            assert (full[name] - weight).norm() <= 1e-5 * weight.norm(), name


@pytest.mark.stack
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_all_pieces_together_are_the_gathered_weights(results: Any, setting: tuple[str, str]) -> None:
    """Each rank writes the elements that replicas expect of it (``chunks_of``)."""
    divided = SETTINGS[setting].get("expert_parallel", 1)
    assert max(slot.groups for slot in results[0][setting]["layout"]) == divided
    for slot in results[0][setting]["layout"]:
        joined = torch.full((slot.numel,), torch.nan)
        for rank, saved in enumerate(results):
            begin, end = shard_of(slot.numel, rank, RANKS, slot.groups)
            own = saved[setting]["memory"][slot.name].flatten()
            assert own[:begin].isnan().all()
            assert own[end:].isnan().all()
            joined[begin:end] = own[begin:end]
        assert torch.equal(joined.view(slot.shape), results[0][setting]["full"][slot.name]), slot.name


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3", {}, "the experts of qwen3 cannot be divided among ranks"),
        ("qwen3_moe", {"num_experts": 6}, "6 experts cannot be divided evenly among 4 ranks"),
        ("mixtral", {"hidden_act": "gelu"}, "activated by gelu"),
    ],
)
def test_models_whose_experts_cannot_be_divided_are_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    from transformers import AutoConfig

    trainer = TrainerSpec(ranks=RANKS, expert_parallel=2)
    with pytest.raises(ExpertError, match=message):
        check_experts(AutoConfig.for_model(kind, **changes), trainer)
    check_experts(AutoConfig.for_model(kind, **changes), trainer.model_copy(update={"expert_parallel": 1}))
