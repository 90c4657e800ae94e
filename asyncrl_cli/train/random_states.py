"""The random-number states of one process: Python's, NumPy's, torch's, and the GPU's where there is one."""

from __future__ import annotations

import random
from pathlib import Path


def save_random_states(path: Path) -> None:
    """Write all states of this process to a file."""
    import numpy as np
    import torch

    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    torch.save(states, path)


def restore_random_states(path: Path) -> None:
    """Set all states of this process to what was saved. A GPU's state stays as it is where none was saved."""
    import numpy as np
    import torch

    states = torch.load(path, weights_only=False)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
