"""The warm start's Muon compared with PyTorch's, which iterates in bfloat16, and with the mathematics."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.train.warm_start import Muon, orthogonalized

SIZES = st.integers(1, 12)


@given(count=st.integers(1, 3), rows=SIZES, columns=SIZES, seed=st.integers(0, 2**31))
def test_singular_vectors_stay_and_values_come_near_one(count: int, rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = min(rows, columns)
    left = torch.linalg.qr(torch.randn(count, rows, size, generator=generator))[0]
    right = torch.linalg.qr(torch.randn(count, columns, size, generator=generator))[0]
    values = 0.2 + torch.rand(count, 1, size, generator=generator)
    found = orthogonalized((left * values) @ right.mT)
    inside = left.mT @ found @ right
    torch.testing.assert_close(left @ inside @ right.mT, found, atol=1e-3, rtol=0)
    diagonal = inside.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(torch.diag_embed(diagonal), inside, atol=1e-3, rtol=0)
    assert bool(((diagonal > 0.5) & (diagonal < 1.5)).all())


def test_a_matrix_of_zeros_stays_one() -> None:
    assert not orthogonalized(torch.zeros(2, 3, 4)).any()


@pytest.mark.parametrize("shape", [(8, 8), (16, 8), (8, 24)])
def test_steps_equal_pytorchs_within_rounding(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    start = [torch.randn(shape) for _ in range(3)]
    ours, theirs = ([torch.nn.Parameter(one.clone()) for one in start] for _ in range(2))
    pool = ThreadPoolExecutor(2)
    mine = Muon(ours, lr=0.02, momentum=0.95, weight_decay=0.1, pool=pool)
    reference = torch.optim.Muon(theirs, lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="original")
    for _ in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(shape)
            other.grad = one.grad.clone()
        ours[0].grad = theirs[0].grad = None
        mine.step()
        reference.step()
    assert torch.equal(ours[0], start[0])
    for one, other, before in zip(ours[1:], theirs[1:], start[1:], strict=True):
        moved = (one - before).norm()
        assert float((one - other).norm()) < 0.03 * float(moved), "the iteration of PyTorch rounds to bfloat16"
