"""Two real gloo ranks that share the positions of their rows have one rank's results, for every kind of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from sequence_one import ARCHITECTURES, VARLEN

pytestmark = pytest.mark.stack

REFUSED = {
    "qwen3, three heads": "3 attention heads and 3 key-value heads have no equal shares",
    "phi3, frequencies by length": "rotary embeddings of type longrope depend on a sequence's length",
    "qwen3_5, linear attention": "3 of the 4 layers of this qwen3_5_text mix positions by other means than attention",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("sequence")
    spec = ("trainer.ranks=2", "trainer.sequence_parallel=2", "model.init.config.num_attention_heads=4")
    return run_ranks("sequence_one", folder, spec)


CASES = [(name, packing) for name in ARCHITECTURES if name not in REFUSED for packing in (False, True)]


@pytest.mark.parametrize(("name", "packing"), [*CASES, *((name, "varlen") for name in VARLEN)])
def test_shared_sequences_have_the_numbers_of_one_rank(results: Any, name: str, packing: bool | str) -> None:
    for rank in results:
        result = rank[name, packing]
        assert not isinstance(result, Exception), result
        (scores, gradient), (shared_scores, shared_gradient) = result["full"], result["shared"]
        torch.testing.assert_close(shared_scores, scores, rtol=0, atol=1e-5)
        assert (shared_gradient - gradient).norm() < 1e-5 * gradient.norm()


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_models_whose_sequences_cannot_be_shared_are_refused(results: Any, name: str, message: str) -> None:
    for rank in results:
        assert message in rank[name, False].message
        assert rank[name, False].location == "trainer.sequence_parallel"


def test_the_ranks_of_a_group_have_the_same_bits(results: Any) -> None:
    """Otherwise ranks of a group would have different losses."""
    for key in results[0]:
        if not isinstance(results[0][key], Exception):
            assert torch.equal(results[0][key]["shared"][0], results[1][key]["shared"][0]), key
