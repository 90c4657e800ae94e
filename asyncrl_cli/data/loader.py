"""The endless, resumable stream of training prompts, and online filtering.

Invariant: an epoch has each row once, in an order that depends only on (seed, epoch) (``_order``). So
``(epoch, position)`` is the complete state, and a restored loader continues with exactly the next prompt.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.core.seeds import derive_fraction
from asyncrl_cli.records.prompt import Prompt


class PromptLoader:
    """``next()`` returns prompts without end. For one caller at a time."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        """``prompts`` may have an attribute ``strata``, the task of each row. Shuffling keeps the order of tasks.

        Raises ``DataError`` without prompts.
        """
        if not prompts:
            raise DataError("there are no prompts to train on", hint="set data.train.size, or name a file with rows")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._begin(epoch=0)

    def __len__(self) -> int:
        """Number of prompts in an epoch."""
        return len(self._prompts)

    @property
    def epoch(self) -> int:
        """Epoch of the newest prompt returned."""
        return self._epoch

    def next(self) -> Prompt:
        """Return the next prompt; an epoch's last prompt is followed by the next epoch's first.

        Raises ``DataError`` for a row that is not a prompt; the next call continues after it.
        """
        if self._position == len(self):
            self._begin(self._epoch + 1)
        self._position += 1
        return self.newest()

    def state(self) -> dict[str, int]:
        """Return ``epoch`` and ``position``: completed epochs, and prompts returned in the present one."""
        return {"epoch": self._epoch, "position": self._position}

    def restore(self, state: dict[str, int]) -> None:
        """Continue from the ``state`` of a loader with the same prompts, seed and shuffle.

        Raises ``DataError`` for a state that these prompts cannot have.
        """
        epoch, position = state["epoch"], state["position"]
        if epoch < 0 or not 0 <= position <= len(self):
            raise DataError(
                f"there is no position {position} in epoch {epoch} of {len(self)} training prompts",
                hint="resume with the data that the run was started with",
            )
        if epoch != self._epoch:
            self._begin(epoch)
        self._position = position

    def newest(self) -> Prompt:
        """Return the last returned prompt again. Not allowed at an epoch's beginning."""
        return self._prompts[self._row_order[self._position - 1]]

    def _begin(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._row_order = self._order()

    def _order(self) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self))
        indices = list(range(len(self)))
        # A resumed run must draw the same order again: it knows only its position in the epoch (decision 0009).
        random.Random(f"{self._seed}/{self._epoch}").shuffle(indices)
        strata: Sequence[int] | None = getattr(self._prompts, "strata", None)
        if strata is None:
            return indices
        shuffled: dict[int, list[int]] = {}
        for row in reversed(indices):
            shuffled.setdefault(int(strata[row]), []).append(row)
        return [shuffled[int(strata[row])].pop() for row in range(len(self))]


class PromptFilter:
    """Excludes solved training prompts, and gives their turns to others.

    A prompt is excluded once every rollout of its group was right in ``solved_streak`` visits in a row. It keeps
    ``revisit_fraction`` of its turns, and returns when it is not solved in one of them.

    Invariant: exclusions depend only on the visits' outcomes, which are in the journal (``restore``).
    """

    def __init__(self, solved_streak: int, revisit_fraction: float, seed: int) -> None:
        self._solved_streak = solved_streak
        self._revisit_fraction = revisit_fraction
        self._seed = seed
        self._streaks: dict[str, int] = {}
        """By uid: number of newest visits in a row that solved the prompt."""

    @property
    def filtered(self) -> int:
        """Number of prompts excluded now."""
        return sum(streak >= self._solved_streak for streak in self._streaks.values())

    def restore(self, streaks: Mapping[str, int]) -> None:
        """Replace all streaks by these, given by uid."""
        self._streaks = dict(streaks)

    def visited(self, uid: str, solved: bool) -> None:
        """Note the end of a visit. ``solved``: every rollout was right."""
        if solved:
            self._streaks[uid] = self._streaks.get(uid, 0) + 1
        else:
            self._streaks.pop(uid, None)

    def excludes(self, uid: str, epoch: int) -> bool:
        """Return True if the prompt's turn in this epoch goes to another prompt."""
        if self._streaks.get(uid, 0) < self._solved_streak:
            return False
        return derive_fraction(self._seed, epoch, uid) >= self._revisit_fraction
