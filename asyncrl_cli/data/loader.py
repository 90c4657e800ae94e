"""The endless, resumable stream of training prompts.

An epoch gives out the rows of one stage, each once; without a curriculum there is one stage that never ends, of all
rows. The last epoch of a stage that ends is cut where the stage is.

Invariant: what an epoch gives out, and in which order, follows from (seed, epoch) alone; so ``(epoch, position)`` is
the whole state, and a restored loader continues with the very prompt that would have come next. ``_order`` is the one
place where an order is made.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.records.prompt import Prompt


@runtime_checkable
class Stratified(Protocol):
    """Rows of several kinds in a certain order of kinds, ``strata``: each row's kind. Shuffling keeps that order."""

    strata: Sequence[int]


@dataclass(frozen=True, slots=True)
class Stage:
    """The rows (at least one) that prompts come from, and how many prompts that goes on for; None: for ever."""

    rows: Sequence[int]
    prompts: int | None = None

    @property
    def epochs(self) -> int | None:
        """Epochs in it, the last perhaps cut."""
        return None if self.prompts is None else -(-self.prompts // len(self.rows))

    def length(self, epoch: int) -> int:
        """Prompts of an epoch, counted from the stage's first."""
        rows = len(self.rows)
        return rows if self.prompts is None else min(rows, self.prompts - epoch * rows)


class PromptLoader:
    """``next()`` gives one prompt after the other, for ever. For one caller at a time."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool, stages: Sequence[Stage] = ()) -> None:
        """After ``stages`` come all rows, unless the last one has no end.

        Raises ``DataError`` if there are no prompts.
        """
        if not prompts:
            raise DataError("there are no prompts to train on", hint="give data.train a size, or a file with rows")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._stages = (*stages, Stage(range(len(prompts))))
        self._epoch = 0
        self._position = 0
        self._begin_epoch()

    def __len__(self) -> int:
        """Prompts in the present epoch."""
        return self._length

    @property
    def epoch(self) -> int:
        """The epoch of the newest prompt given out."""
        return self._epoch

    def next(self) -> Prompt:
        """The next prompt; after the last one of an epoch comes the first one of the next.

        Raises ``DataError`` for a row that is no prompt; the next call goes on after it.
        """
        if self._position == self._length:
            self._epoch += 1
            self._position = 0
            self._begin_epoch()
        self._position += 1
        return self._prompts[self._indices[self._position - 1]]

    def state(self) -> dict[str, int]:
        """``epoch`` and ``position``: whole epochs behind, and prompts given out in this one."""
        return {"epoch": self._epoch, "position": self._position}

    def restore(self, state: dict[str, int]) -> None:
        """Continue where a loader with the same prompts, seed, shuffle and stages stood when it gave ``state``.

        Raises ``DataError`` for a state that these prompts cannot have.
        """
        epoch, position = state["epoch"], state["position"]
        stage, within = self._stage_of(max(0, epoch))
        if epoch < 0 or not 0 <= position <= stage.length(within):
            raise DataError(
                f"{len(self._prompts)} training prompts cannot be at position {position} of epoch {epoch}",
                hint="resume with the data the run was started with",
            )
        if epoch != self._epoch:
            self._epoch = epoch
            self._begin_epoch()
        self._position = position

    def newest(self) -> Prompt:
        """The prompt given out last in the present epoch, which must not be at its beginning."""
        return self._prompts[self._indices[self._position - 1]]

    def _stage_of(self, epoch: int) -> tuple[Stage, int]:
        """The stage that an epoch is in, and its number there."""
        for stage in self._stages:
            epochs = stage.epochs
            if epochs is None or epoch < epochs:
                return stage, epoch
            epoch -= epochs
        raise AssertionError("the last stage has no end")

    def _begin_epoch(self) -> None:
        stage, epoch = self._stage_of(self._epoch)
        self._indices = self._order(stage.rows)
        self._length = stage.length(epoch)

    def _order(self, rows: Sequence[int]) -> Sequence[int]:
        """The current epoch's order of a stage's rows."""
        if not self._shuffle:
            return rows
        indices = list(rows)
        random.Random(f"{self._seed}/{self._epoch}").shuffle(indices)
        if not isinstance(self._prompts, Stratified):
            return indices
        strata = self._prompts.strata
        shuffled: dict[int, list[int]] = {}
        for row in reversed(indices):
            shuffled.setdefault(int(strata[row]), []).append(row)
        return [shuffled[int(strata[row])].pop() for row in rows]
