"""Random numbers that depend only on a request's seed and a token's position (decision 0064).

Invariant: no number depends on earlier draws, on the other requests of a step, or on the engine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def position_seeds(seeds: NDArray[np.int64], positions: NDArray[Any]) -> NDArray[np.int64]:
    """Return the seed of each row's noise over the vocabulary. All arrays are [rows]; seeds are taken modulo 2^64.

    ``positions``: index of each row's new token in its sequence, prompt included. A continued request, with its earlier
    tokens in the prompt, therefore draws the same numbers. The hash is output number ``position`` of SplitMix64
    (Steele, Lea and Flood, 2014) started at the mixed seed: for one seed, positions never collide.
    """
    with np.errstate(over="ignore"):  # modulo 2^64 is intended
        steps = (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
        return _mixed(_mixed(seeds.view(np.uint64)) + steps).view(np.int64)


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64 bits; every bit of the input changes half of the output's."""
    words = (words ^ (words >> np.uint64(30))) * _MULTIPLIER_1
    words = (words ^ (words >> np.uint64(27))) * _MULTIPLIER_2
    return words ^ (words >> np.uint64(31))
