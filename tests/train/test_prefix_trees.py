"""Rows with common prefixes: plans, layouts, and a policy with the same log-probs and gradients as separate rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.records.generation import TokenSequence
from asyncrl_cli.spec.sections import TrainerSpec
from asyncrl_cli.train.deepspeed_engine import recompute_activations
from asyncrl_cli.train.model.pass_layout import PassLayout
from asyncrl_cli.train.model.policy import Policy, ValueModel, check_policy
from asyncrl_cli.train.packing import PaddedRows, TrainingRow, microbatch
from asyncrl_cli.train.prefix_trees import PrefixTree, TreeLayout, plan_trees, single_rows, trees_of_update, windows_of
from asyncrl_cli.train.step import plan_minibatch
from tests.orchestrator.stand_ins import spec
from tests.train.test_policy import ARCHITECTURES, make

pytestmark = pytest.mark.slow

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)
"""Keys of rows; three values, so many prefixes are common."""


def keys_of(rows: list[list[int]]) -> list[np.ndarray[Any, Any]]:
    return [np.array(row, np.int64) for row in rows]


@given(rows=ROWS, most=st.integers(1, 40), cost=st.sampled_from([0.0, 0.01, 0.3]), ranks=st.integers(1, 3))
def test_every_row_is_in_one_tree_that_computes_each_prefix_once(
    rows: list[list[int]], most: int, cost: float, ranks: int
) -> None:
    trees = plan_trees(keys_of(rows), most, cost, ranks)
    assert sorted(row for tree in trees for row in tree.rows) == list(range(len(rows)))
    for tree in trees:
        own = [rows[row] for row in tree.rows]
        assert tree.lengths == tuple(map(len, own))
        assert tree.positions == len({tuple(row[:end]) for row in own for end in range(1, len(row) + 1)})
        assert tree.positions <= most or len(own) == 1
        assert tree.shared[0] == 0
        for (one, other), shared in zip(pairwise(own), tree.shared[1:], strict=True):
            assert shared > 0
            assert one[:shared] == other[:shared]
    if cost == 0.0 and ranks == 1 and most == 40:
        roots = {row[0] for row in rows}
        assert len(trees) >= len(roots)
    assert trees == plan_trees(keys_of(rows), most, cost, ranks)


def test_a_minibatch_of_uniform_groups_has_no_trees() -> None:
    assert plan_trees([], max_positions=10, pair_cost=0.0, ranks=2) == []


def test_a_tree_is_cut_where_attention_costs_more_than_it_saves() -> None:
    group = [[7] * 20 + [index] * 50 for index in range(8)]
    assert len(plan_trees(keys_of(group), 1000, pair_cost=0.0)) == 1
    assert len(plan_trees(keys_of(group), 1000, pair_cost=0.01)) == 8
    long = [[7] * 200 + [index] * 50 for index in range(8)]
    assert len(plan_trees(keys_of(long), 1000, pair_cost=0.001)) == 1


QWEN = AutoConfig.for_model("qwen3", hidden_size=1024, num_attention_heads=16, head_dim=128)


def test_a_prompt_is_shared_with_varlen_if_it_is_long() -> None:
    def trees(prompt: int, attention: str) -> int:
        rows = keys_of([[7] * prompt + [index] * 100 for index in range(8)])
        trainer = TrainerSpec.model_validate({"attention": attention, "gpus_per_rank": 1, "dtype": "bfloat16"})
        return len(trees_of_update(rows, trainer, 2**16, QWEN))

    assert [trees(prompt, "varlen") for prompt in (50, 100, 600)] == [8, 8, 1]
    assert trees(100, "sdpa") < 8


def test_rows_that_have_little_in_common_stay_alone() -> None:
    rows = keys_of([[7] * 10 + [index] * 20 for index in (1, 2)] + [[index] * 30 for index in (3, 4)])
    assert len(plan_trees(rows, 1000, pair_cost=0.0)) == 4
    assert len(plan_trees(rows[:2], 1000, pair_cost=0.0)) == 2
    assert len(plan_trees(keys_of([[7] * 15 + [index] * 15 for index in (1, 2)]), 1000, pair_cost=0.0)) == 1


def test_ranks_share_a_group_that_one_rank_would_have_alone() -> None:
    group = keys_of([[7] * 60 + [index] * 10 for index in range(8)])
    assert [tree.positions for tree in plan_trees(group, 1000, 0.0)] == [140]
    two = plan_trees(group, 1000, 0.0, ranks=2)
    assert sorted(tree.positions for tree in two) == [100, 100]
    prompts = keys_of([[index] * 60 + [9] * 10 for index in range(8)])
    assert plan_trees(prompts, 1000, 0.0, ranks=2) == plan_trees(prompts, 1000, 0.0)


@given(rows=ROWS, most=st.integers(3, 40), joined=st.booleans(), window=st.sampled_from([None, 1, 3]))
def test_a_layout_has_every_row_and_shows_each_position_its_ancestors(
    rows: list[list[int]], most: int, joined: bool, window: int | None
) -> None:
    trees = plan_trees(keys_of(rows), most, 0.0)
    own = [rows[row] for tree in trees for row in tree.rows]
    tokens = max(map(len, own)) + 1
    ids = torch.zeros(len(own), tokens, dtype=torch.int64)
    where = torch.zeros(len(own), tokens - 1, dtype=torch.bool)
    for index, row in enumerate(own):
        ids[index, : len(row)] = torch.tensor(row)
        where[index, : len(row)] = True
    layout = TreeLayout.of(trees, tokens, joined)
    size = layout.source.shape[1]
    assert layout.source.shape[0] == (1 if joined else len(trees))
    # The state that a position would have: its path of tokens.
    found, mask = layout.of_tokens(ids).flatten(), layout._mask(window, torch.float32)[:, 0]
    for index, row in enumerate(own):
        for position in range(len(row)):
            slot = int(layout.slots[index, position])
            seen = (mask[slot // size, slot % size] == 0).nonzero().flatten() + slot // size * size
            first = 0 if window is None else max(0, position + 1 - window)
            assert found[seen].tolist() == row[first : position + 1]
            assert layout.positions.flatten()[seen].tolist() == list(range(first, position + 1))
    mask = torch.nn.functional.pad(where, (1, 0))
    assert torch.equal(PassLayout.of(mask, packing=joined, trees=layout).predicting, layout.slots[where])


def group(lengths: list[int], prompt: int = 7, vocabulary: int = 50, experts: int = 0) -> list[TrainingRow]:
    """A prompt with several responses. The last two begin with half of the first one, like branches."""
    random = np.random.default_rng(0)
    start, rows = random.integers(1, vocabulary, prompt), []
    for index, length in enumerate(lengths):
        response = random.integers(1, vocabulary, length).astype(np.int32)
        versions = np.zeros(length, np.int32)
        if index and index >= len(lengths) - 2:
            half = lengths[0] // 2
            response[:half] = rows[0].tokens.ids[prompt : prompt + half]
            versions[:half] = -1
        part = TokenSequence(response, -np.ones(length, np.float32), versions)
        tokens = TokenSequence.context(start).extended(part)
        rows.append(TrainingRow(tokens, 0, True, index, np.zeros(prompt + length, np.int32)))
    return rows


LENGTHS = [9, 4, 12, 1, 6, 11]


def both(rows: list[TrainingRow], packing: bool = False) -> tuple[PaddedRows, PaddedRows]:
    """The rows as one tree, and each alone, in the same order."""
    (tree,) = plan_trees([row.keys() for row in rows], 1000, 0.0)
    in_order = [rows[row] for row in tree.rows]
    own = replace_rows(tree)
    return (
        microbatch(in_order, [own], None, packing),
        microbatch(in_order, single_rows([len(row) for row in in_order]), None, packing),
    )


def replace_rows(tree: PrefixTree) -> PrefixTree:
    return replace(tree, rows=tuple(range(len(tree.rows))))


def scored(policy: Policy, padded: PaddedRows) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and the gradient of a sum in which every token has its own weight."""
    policy.zero_grad()
    logprobs, entropies = policy(padded.input_ids, padded.response_mask, "train", **padded.policy_arguments)
    weights = torch.linspace(0, 1, logprobs.numel()).view(logprobs.shape)
    ((logprobs + 0.3 * entropies) * weights).sum().backward()
    return (
        logprobs.detach(),
        entropies.detach(),
        torch.cat([each.grad.flatten() for each in policy.parameters() if each.grad is not None]),
    )


def assert_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=2e-6 * other.abs().max().item())


FAMILIES = [*ARCHITECTURES, "qwen3_moe"]


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("packing", [False, True])
def test_logprobs_and_gradients_are_those_of_separate_rows(architecture: str, packing: bool) -> None:
    shared, separate = both(group(LENGTHS), packing)
    assert shared.trees is not None
    assert separate.trees is None
    policy = make(architecture, packing=packing)
    assert_equal(scored(policy, shared), scored(policy, separate))


def test_recomputed_layers_see_the_same_mask() -> None:
    shared, _ = both(group(LENGTHS))
    policy = make("qwen3")
    expected = scored(policy, shared)
    recompute_activations(policy.model)
    assert_equal(scored(policy, shared), expected)


def test_several_trees_and_rows_of_their_own_share_a_microbatch() -> None:
    rows = [*group(LENGTHS), *(replace(row, rollout=9) for row in group([5, 3], prompt=4)), *group([8], prompt=3)]
    trees = plan_trees([row.keys() for row in rows], 1000, 0.0)
    policy = make("qwen3")
    for packing in (False, True):
        padded = microbatch(rows, trees, None, packing)
        in_order = [rows[row] for tree in trees for row in tree.rows]
        expected = microbatch(in_order, single_rows([len(row) for row in in_order]), None, packing)
        assert_equal(scored(policy, padded), scored(policy, expected))


def test_a_critic_has_the_values_of_separate_rows() -> None:
    shared, separate = both(group(LENGTHS))
    critic = ValueModel(make("qwen3").model.base_model)
    torch.nn.init.normal_(critic.head.weight)
    values = [critic(one.input_ids, one.response_mask, **one.model_arguments) for one in (shared, separate)]
    assert_equal((values[0],), (values[1],))


def test_gradients_are_the_same_bits_with_several_threads() -> None:
    """Eight rows read the state of the prompt's last token, and the sum of their gradients has a fixed order."""
    shared, _ = both(group([30] * 8, prompt=40))
    policy, threads = make("qwen3", hidden_size=256), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = scored(policy, shared)
        for _ in range(3):
            assert all(map(torch.equal, scored(policy, shared), first))
    finally:
        torch.set_num_threads(threads)


def test_tokens_with_other_experts_are_not_shared() -> None:
    rows = group([3, 3])
    ids = np.arange(2 * len(rows[0])).reshape(-1, 2).astype(np.uint8)
    changed = ids.copy()
    changed[5] = 77  # chosen in the fifth token's pass
    for experts, shared in ((ids, 8), (changed, 4)):
        two = [
            replace(row, tokens=replace(row.tokens, experts=own)) for row, own in zip(rows, (ids, experts), strict=True)
        ]
        (tree,) = plan_trees([row.keys() for row in two], 1000, 0.0)
        assert max(tree.shared) == shared
    padded = microbatch(two, [tree], None, False)
    assert padded.experts is not None
    assert padded.experts[0, :6].tolist() == ids[1:7].tolist()


def test_rows_with_and_without_recorded_experts_are_not_shared() -> None:
    """A resume has changed `algorithm.router_replay`."""
    first, second = group([3, 3])
    experts = np.zeros((len(first), 2), np.uint8)
    rows = [replace(first, tokens=replace(first.tokens, experts=experts)), second]
    policy = make("qwen3")
    policy.shares_prefixes = True
    engine = SimpleNamespace(module=policy, device=torch.device("cpu"))
    learner: Any = SimpleNamespace(spec=spec(), engine=engine, rank=0, vision=None)
    assert [tree.rows for tree in plan_minibatch(learner, rows, 1000).trees] == [(0,), (1,)]


@pytest.mark.parametrize("architecture", [*FAMILIES, "gemma2"])
def test_models_that_share_prefixes_pass_the_check(architecture: str) -> None:
    policy = make(architecture, **({"final_logit_softcapping": None} if architecture == "gemma2" else {}))
    policy.shares_prefixes = True
    check_policy(policy, policy)


def test_a_model_that_does_not_see_the_tree_is_refused() -> None:
    policy = make("qwen3")
    policy.shares_prefixes = True
    forward = policy.model.model.forward
    policy.model.model.forward = lambda **given: forward(**{**given, "attention_mask": None})
    with pytest.raises(UserError, match="with shared prefixes") as caught:
        check_policy(policy, policy)
    assert caught.value.hint == "set trainer.share_prefixes to false"


def test_layers_without_attention_or_with_chunks_are_known() -> None:
    from transformers import AutoConfig

    assert windows_of(AutoConfig.for_model("qwen3")) == {"full_attention": None}
    assert windows_of(AutoConfig.for_model("mistral", sliding_window=5)) == {"": 5}
    assert windows_of(AutoConfig.for_model("qwen3_next")) is None
    assert windows_of(AutoConfig.for_model("llama4_text")) is None
