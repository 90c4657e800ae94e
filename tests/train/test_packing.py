"""Plans: every row once, within limits, equal over ranks, and with the fewest possible micro-batches; and padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.records.generation import TokenSequence
from asyncrl_cli.train.model.pass_layout import moved
from asyncrl_cli.train.packing import TrainingRow, pad_rows, plan_microbatches

LENGTHS = st.lists(st.integers(1, 40), max_size=40)


@given(lengths=LENGTHS, budget=st.integers(1, 150), ranks=st.integers(1, 5), packing=st.booleans())
def test_every_plan_keeps_its_invariants(lengths: list[int], budget: int, ranks: int, packing: bool) -> None:
    plan = plan_microbatches(lengths, budget, ranks, packing)
    assert len(plan) == ranks
    assert len({len(microbatches) for microbatches in plan}) == 1
    assert plan[0]
    rows = [row for microbatches in plan for rows in microbatches for row in rows]
    assert sorted(rows) == list(range(len(lengths)))
    for microbatches in plan:
        for rows in microbatches:
            taken = [lengths[row] for row in rows]
            assert taken == sorted(taken, reverse=True)
            assert len(rows) <= 1 or (sum(taken) if packing else len(rows) * taken[0]) <= budget
    loads = [sum(lengths[row] for rows in microbatches for row in rows) for microbatches in plan]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    assert plan == plan_microbatches(lengths, budget, ranks, packing)


def fewest(lengths: list[int], budget: int, packing: bool) -> int:
    """The smallest number of micro-batches over all ways to divide the rows."""
    best = len(lengths)

    def fits(group: list[int]) -> bool:
        return (sum(group) if packing else len(group) * max(group)) <= budget

    def assign(index: int, groups: list[list[int]]) -> None:
        nonlocal best
        if len(groups) >= best:
            return
        if index == len(lengths):
            best = len(groups)
            return
        for group in [*groups, []]:
            if not group:
                assign(index + 1, [*groups, [lengths[index]]])
            elif fits([*group, lengths[index]]):
                group.append(lengths[index])
                assign(index + 1, groups)
                group.pop()

    assign(0, [])
    return best


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=7), budget=st.integers(1, 40))
def test_no_grouping_needs_fewer_microbatches(lengths: list[int], budget: int) -> None:
    assert len(plan_microbatches(lengths, budget, ranks=1)[0]) == fewest(lengths, budget, packing=False)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=7), budget=st.integers(12, 40))
def test_packing_is_close_to_the_best(lengths: list[int], budget: int) -> None:
    assert len(plan_microbatches(lengths, budget, 1, packing=True)[0]) <= (11 * fewest(lengths, budget, True) + 6) // 9


def test_a_rank_with_fewer_microbatches_gets_empty_ones() -> None:
    assert plan_microbatches([6, 6, 4, 4, 4], 12, ranks=2) == [[[0, 2], [4]], [[1, 3], []]]


def row(prompt: int, response: int, seed: int = 0) -> TrainingRow:
    generator = np.random.default_rng(seed)
    versions = generator.integers(0, 10, response).astype(np.int32)
    tokens = TokenSequence.context(generator.integers(1, 1000, prompt)).extended(
        TokenSequence(
            generator.integers(1, 1000, response).astype(np.int32),
            -generator.random(response).astype(np.float32),
            versions,
        )
    )
    turns = np.sort(generator.integers(0, 4, prompt + response)).astype(np.int32)
    return TrainingRow(tokens, 9, bool(generator.random() < 0.5), int(generator.integers(100)), turns)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=5), seed=st.integers(0, 10**6)
)
def test_rows_can_be_read_back(sizes: list[tuple[int, int]], seed: int) -> None:
    rows = [row(prompt, response, seed + i) for i, (prompt, response) in enumerate(sizes)]
    padded = pad_rows(rows)
    shape = (len(rows), max(map(len, rows)))
    assert padded.input_ids.dtype == padded.rollouts.dtype == torch.int64
    assert padded.behaviour_logprobs.dtype == torch.float32
    assert padded.response_mask.dtype == padded.on_policy.dtype == torch.bool
    for index, (one, (prompt, _)) in enumerate(zip(rows, sizes, strict=True)):
        ids, versions = padded.input_ids[index], one.tokens.versions[prompt:]
        assert ids.shape == shape[1:]
        assert ids[: len(one)].tolist() == one.tokens.ids.tolist()
        assert not ids[len(one) :].any()
        mask = padded.response_mask[index]
        assert mask.nonzero().flatten().tolist() == list(range(prompt, len(one)))
        for name, expected in (
            ("behaviour_logprobs", one.tokens.logprobs[prompt:]),
            ("on_policy", one.on_policy & (versions == 9)),
        ):
            values = getattr(padded, name)[index]
            np.testing.assert_array_equal(values[mask].numpy(), expected)
            assert not values[~mask].any()
        assert padded.rollouts[index].item() == one.rollout


def test_an_empty_microbatch_is_a_row_that_counts_for_nothing() -> None:
    padded = pad_rows([])
    assert padded.input_ids.tolist() == [[0, 0]]
    assert not padded.response_mask.any()
    assert padded.rollouts.tolist() == [0]


def test_rows_without_a_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match="row 1 has no prompt"):
        pad_rows([row(2, 3), row(0, 3)])


@given(
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9), st.booleans()), min_size=1, max_size=5),
    dtype=st.sampled_from([np.uint8, np.uint16]),
)
def test_recorded_experts_are_with_their_tokens(sizes: list[tuple[int, int, bool]], dtype: type) -> None:
    """Rows without recorded experts have unknown ones; if no row has recorded experts there is no matrix."""
    rows, expected = [], []
    for index, (prompt, response, recorded) in enumerate(sizes):
        plain = row(prompt, response, index)
        experts = np.arange(1, 1 + 4 * len(plain)).reshape(-1, 4).astype(dtype)
        rows.append(replace(plain, tokens=replace(plain.tokens, experts=experts if recorded else None)))
        expected.append(experts if recorded else 0 * experts)
    padded = pad_rows(rows)
    if not any(recorded for *_, recorded in sizes):
        assert padded.experts is None
        assert padded.policy_arguments == {}
        return
    assert padded.experts is not None
    assert padded.experts.dtype == (torch.uint8 if dtype is np.uint8 else torch.int32)
    assert padded.experts.shape == (*padded.input_ids.shape, 4)
    for found, experts in zip(padded.experts.numpy(), expected, strict=True):
        assert found[: len(experts)].tolist() == experts.tolist()
        assert not found[len(experts) :].any()
    assert moved(padded, "meta").policy_arguments["experts"].is_meta
