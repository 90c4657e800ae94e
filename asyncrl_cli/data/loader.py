"""The endless, resumable stream of training prompts, the stages of a curriculum, and online filtering.

An epoch has the rows of one stage, each once; without a curriculum there is one endless stage of all rows. The last
epoch of a stage ends where the stage does.

Invariant: the rows of an epoch and their order follow from (seed, epoch) alone (``_order``). So ``(epoch, position)``
is the complete state, and a restored loader continues with exactly the next prompt.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.core.seeds import derive_fraction
from asyncrl_cli.data.rows import field_of
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import CurriculumSpec


@runtime_checkable
class Stratified(Protocol):
    """Rows of several kinds: ``strata`` is each row's kind. Shuffling keeps the order of kinds."""

    strata: Sequence[int]


@dataclass(frozen=True, slots=True)
class Stage:
    """The rows (at least one) that prompts come from, and how many prompts; None: no end."""

    rows: Sequence[int]
    prompts: int | None = None

    @property
    def epochs(self) -> int | None:
        """Epochs in it; the last one may be shorter."""
        return None if self.prompts is None else -(-self.prompts // len(self.rows))

    def length(self, epoch: int) -> int:
        """Prompts of an epoch, counted from the stage's first."""
        rows = len(self.rows)
        return rows if self.prompts is None else min(rows, self.prompts - epoch * rows)


class PromptLoader:
    """``next()`` gives one prompt after the other, without an end. For one caller at a time."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool, stages: Sequence[Stage] = ()) -> None:
        """After ``stages`` come all rows, unless the last one has no end.

        Raises ``DataError`` if there are no prompts.
        """
        if not prompts:
            raise DataError("there are no prompts to train on", hint="set data.train.size, or name a file with rows")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._stages = (*stages, Stage(range(len(prompts))))
        self._begin(epoch=0)

    def __len__(self) -> int:
        """Prompts in the present epoch."""
        return self._length

    @property
    def epoch(self) -> int:
        """The epoch of the newest prompt given out."""
        return self._epoch

    def prompts_in(self, epochs: int) -> int:
        """Prompts of the first ``epochs`` epochs."""
        return sum(stage.length(within) for stage, within in map(self._stage_of, range(epochs)))

    def next(self) -> Prompt:
        """The next prompt; after the last one of an epoch, the first one of the next epoch.

        Raises ``DataError`` for a row that is not a prompt; the next call continues after it.
        """
        if self._position == self._length:
            self._begin(self._epoch + 1)
        self._position += 1
        return self.newest()

    def state(self) -> dict[str, int]:
        """``epoch`` and ``position``: completed epochs, and prompts given out in this one."""
        return {"epoch": self._epoch, "position": self._position}

    def restore(self, state: dict[str, int]) -> None:
        """Continue where a loader with the same prompts, seed, shuffle and stages was when it returned ``state``.

        Raises ``DataError`` for a state that these prompts cannot have.
        """
        epoch, position = state["epoch"], state["position"]
        stage, within = self._stage_of(max(0, epoch))
        if epoch < 0 or not 0 <= position <= stage.length(within):
            raise DataError(
                f"there is no position {position} in epoch {epoch} of {len(self._prompts)} training prompts",
                hint="resume with the data the run was started with",
            )
        if epoch != self._epoch:
            self._begin(epoch)
        self._position = position

    def newest(self) -> Prompt:
        """The prompt given out last in this epoch, which must not be at its beginning."""
        return self._prompts[self._indices[self._position - 1]]

    def _stage_of(self, epoch: int) -> tuple[Stage, int]:
        """The stage that an epoch is in, and its number there."""
        for stage in self._stages:
            epochs = stage.epochs
            if epochs is None or epoch < epochs:
                return stage, epoch
            epoch -= epochs
        raise AssertionError("the last stage has no end")

    def _begin(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        stage, within = self._stage_of(epoch)
        self._indices = self._order(stage.rows)
        self._length = stage.length(within)

    def _order(self, rows: Sequence[int]) -> Sequence[int]:
        """The current epoch's order of a stage's rows."""
        if not self._shuffle:
            return rows
        indices = list(rows)
        # A resumed run must draw the same order again: it knows only its position in it (decision 0009).
        random.Random(f"{self._seed}/{self._epoch}").shuffle(indices)
        if not isinstance(self._prompts, Stratified):
            return indices
        strata = self._prompts.strata
        shuffled: dict[int, list[int]] = {}
        for row in reversed(indices):
            shuffled.setdefault(int(strata[row]), []).append(row)
        return [shuffled[int(strata[row])].pop() for row in rows]


class PromptFilter:
    """Excludes training prompts that are solved: others have their turns.

    A prompt is excluded once every rollout of its group was right in ``solved_streak`` visits in a row. It keeps
    ``revisit_fraction`` of its turns, and returns when it is not solved in one of them.

    Invariant: which prompts are excluded follows from the visits' outcomes alone, which the journal has (``restore``).
    """

    def __init__(self, solved_streak: int, revisit_fraction: float, seed: int) -> None:
        self._solved_streak = solved_streak
        self._revisit_fraction = revisit_fraction
        self._seed = seed
        self._streaks: dict[str, int] = {}
        """For each uid: how many of its newest visits in a row solved it."""

    @property
    def filtered(self) -> int:
        """Prompts that are excluded now."""
        return sum(streak >= self._solved_streak for streak in self._streaks.values())

    def restore(self, streaks: Mapping[str, int]) -> None:
        """Forget everything but these streaks, by uid."""
        self._streaks = dict(streaks)

    def visited(self, uid: str, solved: bool) -> None:
        """A visit has ended; it was ``solved`` when every rollout was right."""
        if solved:
            self._streaks[uid] = self._streaks.get(uid, 0) + 1
        else:
            self._streaks.pop(uid, None)

    def excludes(self, uid: str, epoch: int) -> bool:
        """Whether a prompt's turn in an epoch goes to others."""
        if self._streaks.get(uid, 0) < self._solved_streak:
            return False
        return derive_fraction(self._seed, epoch, uid) >= self._revisit_fraction


def stages_of(prompts: Sequence[Prompt], spec: CurriculumSpec | None) -> tuple[Stage, ...]:
    """The stages of a curriculum over these prompts.

    Raises ``DataError`` for a row without difficulty, and for a stage without rows.
    """
    if spec is None:
        return ()
    difficulties = _difficulties(prompts, spec.field)
    stages = []
    drawn = 0
    for number, stage in enumerate(spec.stages):
        low = -math.inf if stage.min is None else stage.min
        high = math.inf if stage.max is None else stage.max
        rows = [row for row, difficulty in enumerate(difficulties) if low <= difficulty <= high]
        if not rows:
            raise DataError(
                f"no training prompt has a `{spec.field}` from {low:g} to {high:g}",
                location=f"data.curriculum.stages.{number}",
                hint=f"the difficulties of the prompts are {min(difficulties):g} to {max(difficulties):g}",
            )
        stages.append(Stage(rows, None if stage.until_prompt is None else stage.until_prompt - drawn))
        drawn = stage.until_prompt or drawn
    return tuple(stages)


def _difficulties(prompts: Sequence[Prompt], field: str) -> list[float]:
    found = []
    for row, value in enumerate(field_of(prompts, field)):
        try:
            # A CSV file has only texts.
            number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            fault = "missing" if value is None else f"{value!r}, which is not a number"
            raise DataError(
                f"prompt {prompts[row].uid!r}: `{field}` is {fault}",
                location="data.curriculum",
                hint="name a field with a number in every row",
            )
        found.append(number)
    return found
