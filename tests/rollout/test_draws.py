"""Random numbers depend only on seed and position, and are different for each seed and position."""

from __future__ import annotations

import numpy as np

from asyncrl_cli.rollout.draws import position_seeds


def row_seeds(rows: list[tuple[int, int]]) -> list[int]:
    seeds, positions = zip(*rows, strict=True)
    found: list[int] = position_seeds(np.array(seeds, np.int64), np.array(positions, np.int32)).tolist()
    return found


def test_seeds_are_outputs_of_splitmix64() -> None:
    """The first outputs of the published generator for the seed 0, which the mixing does not change."""
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [one % 2**64 for one in row_seeds([(0, position) for position in range(4)])] == outputs


def test_near_seeds_and_positions_have_unrelated_numbers() -> None:
    """If seed or position changes by one, each of the 64 bits changes in half of the cases."""
    grid = np.array([row_seeds([(seed, position) for position in range(512)]) for seed in range(64)], np.int64)
    assert len(np.unique(grid)) == grid.size
    for changed in (grid[1:] ^ grid[:-1], grid[:, 1:] ^ grid[:, :-1]):
        bits = np.unpackbits(changed.reshape(-1, 1).view(np.uint8), axis=1).mean(0)
        assert np.abs(bits - 0.5).max() < 0.02  # a tolerance of seven standard errors
