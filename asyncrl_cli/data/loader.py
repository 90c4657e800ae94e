"""The endless, resumable stream of training prompts.

Invariant: epoch ``e`` visits every prompt exactly once, in an order that follows from (seed, e) alone; so
``(epoch, position)`` is the whole state, and a restored loader continues with the very prompt that would have
come next. ``_order`` is the one place where an order is made.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from asyncrl_cli.data.errors import DataError
from asyncrl_cli.data.prompts import Prompt


class PromptLoader:
    """``next()`` gives one prompt after the other, for ever. For one caller at a time."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        """Raises ``DataError`` if there are no prompts."""
        if not prompts:
            raise DataError("there are no prompts to train on", mend="give data.train a size, or a file with rows")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._indices = self._order()

    def next(self) -> Prompt:
        """The next prompt; after the last one of an epoch comes the first one of the next."""
        if self._position == len(self._prompts):
            self._epoch += 1
            self._position = 0
            self._indices = self._order()
        prompt = self._prompts[self._indices[self._position]]
        self._position += 1
        return prompt

    def state(self) -> dict[str, int]:
        """``epoch`` and ``position``: whole epochs behind, and prompts given out in this one."""
        return {"epoch": self._epoch, "position": self._position}

    def restore(self, state: dict[str, int]) -> None:
        """Continue where a loader with the same prompts, seed and shuffle stood when it gave ``state``.

        Raises ``DataError`` for a state that these prompts cannot have.
        """
        epoch, position = state["epoch"], state["position"]
        if epoch < 0 or not 0 <= position <= len(self._prompts):
            raise DataError(
                f"{len(self._prompts)} training prompts cannot be at position {position} of epoch {epoch}",
                mend="resume with the data the run was started with",
            )
        self._epoch, self._position = epoch, position
        self._indices = self._order()

    def _order(self) -> Sequence[int]:
        """The current epoch's order of rows."""
        if not self._shuffle:
            return range(len(self._prompts))
        indices = list(range(len(self._prompts)))
        random.Random(f"{self._seed}/{self._epoch}").shuffle(indices)
        return indices
