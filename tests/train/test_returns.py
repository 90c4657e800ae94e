"""Advantages of tokens compared with the papers' sums in float64, over counted tokens only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import SIZES, Matrices, matrices, tensors, with_garbage
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl_cli.train.algorithms.advantages import Moments, gae, rewards_at_turn_ends, rewards_to_go, whiten

pytestmark = pytest.mark.slow

DECAYS = st.sampled_from([0.0, 0.5, 0.99, 1.0])


def rewards_and_values(seed: int, rows: int, tokens: int) -> Matrices:
    case = matrices(seed, rows, tokens, 0.3)
    return {"rewards": case["advantages"], "values": case["behaviour"], "mask": case["mask"]}


def spread_out(compact: list[np.ndarray], mask: np.ndarray) -> np.ndarray:
    """Rows of the counted tokens' numbers, at their positions in the mask."""
    full = np.zeros(mask.shape)
    for row, numbers in enumerate(compact):
        full[row, mask[row]] = numbers
    return full


def discounted(numbers: np.ndarray, decay: float) -> np.ndarray:
    """Σ decay^(k − t) x_k over k from t on."""
    size = len(numbers)
    powers = np.array([[decay ** (k - t) if k >= t else 0.0 for k in range(size)] for t in range(size)])
    return powers.reshape(size, size) @ numbers


@given(seed=SIZES["seed"], rows=SIZES["rows"], tokens=SIZES["tokens"], gamma=DECAYS, lam=DECAYS)
def test_advantages_and_returns_match_the_papers(seed: int, rows: int, tokens: int, gamma: float, lam: float) -> None:
    """GAE as Σ (γλ)^l δ_{t+l}, and returns as discounted sums, without recursion."""
    case = rewards_and_values(seed, rows, tokens)
    mask = case["mask"]
    to_go, advantages, returns = [], [], []
    for row in range(rows):
        rewards, values = (case[name][row, mask[row]].astype(np.float64) for name in ("rewards", "values"))
        delta = rewards + gamma * np.append(values[1:], 0.0)[: len(values)] - values
        to_go.append(discounted(rewards, gamma))
        advantages.append(discounted(delta, gamma * lam))
        returns.append(advantages[-1] + values)
    rewards_, values_, mask_ = tensors(with_garbage(case, 2), "rewards", "values", "mask")
    found = (rewards_to_go(rewards_, mask_, gamma), *gae(rewards_, values_, mask_, gamma, lam))
    for one, expected in zip(found, (to_go, advantages, returns), strict=True):
        assert one.dtype == torch.float32
        np.testing.assert_allclose(one[:, :tokens].numpy(), spread_out(expected, mask), rtol=1e-5, atol=1e-6)
        assert not one[~mask_].any()


class Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.count += 1
        return operation(*arguments, **(options or {}))


def test_rows_of_8192_tokens_take_few_operations_and_no_row_depends_on_the_padding() -> None:
    """On a GPU every operation is a kernel launch: with one operation per column this took a second."""
    random = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 2, 8192, generator=random)
    mask = torch.rand(2, 8192, generator=random) < 0.5
    mask[:, 100:] = False
    with Operations() as operations:
        wide = gae(rewards, values, mask, 0.99, 0.95)[0]
    assert operations.count < 150
    assert torch.equal(wide[:, :100], gae(rewards[:, :100], values[:, :100], mask[:, :100], 0.99, 0.95)[0])


@given(
    seed=SIZES["seed"],
    rows=st.integers(1, 3),
    turns=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=6),
    gamma=st.sampled_from([1.0, 0.9]),
)
def test_from_each_token_on_the_rewards_are_those_of_its_turn_and_all_later_ones(
    seed: int, rows: int, turns: list[tuple[int, int]], gamma: float
) -> None:
    """``turns``: the row and the sampled tokens of each turn of one rollout; context comes in between."""
    random = np.random.default_rng(seed)
    rewards = random.normal(size=len(turns))
    tokens: list[list[int]] = [[] for _ in range(rows)]  # the turn of each token, -1 for context
    for number, (row, count) in enumerate(turns):
        tokens[row % rows] += [-1] * int(random.integers(3)) + [number] * count
    longest = max(map(len, tokens)) + 1
    of_tokens = torch.tensor([row + [-1] * (longest - len(row)) for row in tokens])
    mask = of_tokens >= 0
    given_turns = torch.where(mask, of_tokens, 0)
    padded = torch.from_numpy(np.append(rewards, np.nan)).expand(rows, -1)
    found = rewards_at_turn_ends(padded, given_turns, mask)
    assert not found[~mask].any()
    to_go = rewards_to_go(found, mask, 1.0)
    later = np.append(rewards[::-1].cumsum()[::-1], 0.0)
    torch.testing.assert_close(to_go, torch.from_numpy(later[of_tokens.numpy()]), rtol=1e-9, atol=1e-9)
    if rows == 1 and gamma < 1:  # in one row each turn's reward is at its last token, and the discount applies
        last = {turn: place for place, turn in enumerate(of_tokens[0].tolist()) if turn >= 0}
        for turn, place in last.items():
            assert found[0, place].item() == pytest.approx(rewards[turn], abs=1e-9)
        discounted = rewards_to_go(found, mask, gamma)[0]
        sampled = [place for place in range(longest) if mask[0, place]]
        steps = {place: step for step, place in enumerate(sampled)}
        first = sum(gamma ** steps[last[turn]] * rewards[turn] for turn in range(len(turns)))
        assert discounted[sampled[0]].item() == pytest.approx(first, abs=1e-9)


@given(seed=SIZES["seed"], rows=SIZES["rows"], tokens=SIZES["tokens"], offset=st.sampled_from([0.0, 100.0]))
def test_whitening_matches_numpy_however_moments_were_added(seed: int, rows: int, tokens: int, offset: float) -> None:
    case = rewards_and_values(seed, rows, tokens)
    case["values"] += np.float32(offset)
    values, mask = tensors(with_garbage(case, 1), "values", "mask")
    moments = Moments.of(values[:0], mask[:0])
    for row in reversed(range(rows)):
        moments = moments + Moments.of(values[row : row + 1], mask[row : row + 1])
    kept = case["values"][case["mask"]].astype(np.float64)
    expected = np.zeros(case["mask"].shape)
    if len(kept) > 1:
        expected[case["mask"]] = (kept - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8)
    found = whiten(values, mask, moments)[:, :tokens].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
