"""Random right-padded matrices of log-probs, and changes that no result may depend on."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

Matrices = dict[str, np.ndarray]

SIZES = {
    "seed": st.integers(0, 10**6),
    "rows": st.integers(1, 5),
    "tokens": st.integers(1, 10),
    "spread": st.sampled_from([0.001, 0.3, 3.0]),
}


def matrices(seed: int, rows: int, tokens: int, spread: float) -> Matrices:
    """Log-probs of four policies that are about ``spread`` nats apart, advantages, entropies, and a mask with holes."""
    generator = np.random.default_rng(seed)
    shape = (rows, tokens)
    proximal = -generator.exponential(2.0, shape)

    def near() -> np.ndarray:
        return proximal + spread * generator.standard_normal(shape)

    floats = {
        "logprobs": near(),
        "proximal": proximal,
        "behaviour": near(),
        "reference": near(),
        "advantages": generator.choice([-1.5, -0.3, 0.0, 0.7, 2.0], shape),
        "entropies": generator.exponential(1.0, shape),
    }
    mask = generator.random(shape) < 0.7
    return {name: array.astype(np.float32) for name, array in floats.items()} | {"mask": mask}


def exact(case: Matrices) -> Matrices:
    """The same numbers in float64."""
    return {name: array if name == "mask" else array.astype(np.float64) for name, array in case.items()}


def tensors(case: Matrices, *names: str) -> list[Tensor]:
    return [torch.from_numpy(case[name].copy()) for name in names]


def with_garbage(case: Matrices, columns: int) -> Matrices:
    """The same with ``columns`` more columns, and NaN wherever the mask is false."""
    wide = {name: np.pad(array, ((0, 0), (0, columns))) for name, array in case.items()}
    mask = wide["mask"]
    return {name: array if name == "mask" else np.where(mask, array, np.float32("nan")) for name, array in wide.items()}
