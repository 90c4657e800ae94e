"""The endless, resumable stream of training prompts, curriculum stages, and online filtering.

An epoch has each row of one stage once; without a curriculum there is one endless stage with all rows. A stage's last
epoch ends with the stage.

Invariant: an epoch's rows and their order depend only on (seed, epoch) (``_order``). So ``(epoch, position)`` is the
complete state, and a restored loader continues with exactly the next prompt.
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
    """Rows of several kinds: ``strata`` has each row's kind. Shuffling keeps the order of kinds."""

    strata: Sequence[int]


@dataclass(frozen=True, slots=True)
class Stage:
    """Rows (at least one) and the number of prompts to draw from them; None: no end."""

    rows: Sequence[int]
    prompts: int | None = None

    @property
    def epochs(self) -> int | None:
        """Number of epochs; the last one may be shorter."""
        return None if self.prompts is None else -(-self.prompts // len(self.rows))

    def length(self, epoch: int) -> int:
        """Return the number of prompts in an epoch, counted from the stage's first epoch."""
        rows = len(self.rows)
        return rows if self.prompts is None else min(rows, self.prompts - epoch * rows)


class PromptLoader:
    """``next()`` returns prompts without end. For one caller at a time."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool, stages: Sequence[Stage] = ()) -> None:
        """After ``stages`` come all rows, unless the last stage has no end. Raises ``DataError`` without prompts."""
        if not prompts:
            raise DataError("there are no prompts to train on", hint="set data.train.size, or name a file with rows")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._stages = (*stages, Stage(range(len(prompts))))
        self._begin(epoch=0)

    def __len__(self) -> int:
        """Number of prompts in the present epoch."""
        return self._length

    @property
    def epoch(self) -> int:
        """Epoch of the newest prompt returned."""
        return self._epoch

    def prompts_in(self, epochs: int) -> int:
        """Return the number of prompts in the first ``epochs`` epochs."""
        return sum(stage.length(within) for stage, within in map(self._stage_of, range(epochs)))

    def next(self) -> Prompt:
        """Return the next prompt; an epoch's last prompt is followed by the next epoch's first.

        Raises ``DataError`` for a row that is not a prompt; the next call continues after it.
        """
        if self._position == self._length:
            self._begin(self._epoch + 1)
        self._position += 1
        return self.newest()

    def state(self) -> dict[str, int]:
        """Return ``epoch`` and ``position``: completed epochs, and prompts returned in the present one."""
        return {"epoch": self._epoch, "position": self._position}

    def restore(self, state: dict[str, int]) -> None:
        """Continue from the ``state`` of a loader with the same prompts, seed, shuffle and stages.

        Raises ``DataError`` for a state that these prompts cannot have.
        """
        epoch, position = state["epoch"], state["position"]
        stage, within = self._stage_of(max(0, epoch))
        if epoch < 0 or not 0 <= position <= stage.length(within):
            raise DataError(
                f"there is no position {position} in epoch {epoch} of {len(self._prompts)} training prompts",
                hint="resume with the data that the run was started with",
            )
        if epoch != self._epoch:
            self._begin(epoch)
        self._position = position

    def newest(self) -> Prompt:
        """Return the last returned prompt again. Not allowed at an epoch's beginning."""
        return self._prompts[self._indices[self._position - 1]]

    def _stage_of(self, epoch: int) -> tuple[Stage, int]:
        """An epoch's stage, and its number within the stage."""
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
        if not self._shuffle:
            return rows
        indices = list(rows)
        # A resumed run must draw the same order again: it knows only its position in the epoch (decision 0009).
        random.Random(f"{self._seed}/{self._epoch}").shuffle(indices)
        if not isinstance(self._prompts, Stratified):
            return indices
        strata = self._prompts.strata
        shuffled: dict[int, list[int]] = {}
        for row in reversed(indices):
            shuffled.setdefault(int(strata[row]), []).append(row)
        return [shuffled[int(strata[row])].pop() for row in rows]


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


def stages_of(prompts: Sequence[Prompt], spec: CurriculumSpec | None) -> tuple[Stage, ...]:
    """Make a curriculum's stages. Raises ``DataError`` for a row without difficulty, and for a stage without rows."""
    if spec is None:
        return ()
    difficulties = _difficulties(prompts, spec.field)
    stages = []
    drawn = 0
    for stage_index, stage in enumerate(spec.stages):
        low = -math.inf if stage.min is None else stage.min
        high = math.inf if stage.max is None else stage.max
        rows = [row for row, difficulty in enumerate(difficulties) if low <= difficulty <= high]
        if not rows:
            raise DataError(
                f"no training prompt has a `{spec.field}` from {low:g} to {high:g}",
                location=f"data.curriculum.stages.{stage_index}",
                hint=f"the difficulties of the prompts are {min(difficulties):g} to {max(difficulties):g}",
            )
        stages.append(Stage(rows, None if stage.until_prompt is None else stage.until_prompt - drawn))
        drawn = stage.until_prompt or drawn
    return tuple(stages)


def _difficulties(prompts: Sequence[Prompt], field: str) -> list[float]:
    difficulties = []
    for row, value in enumerate(field_of(prompts, field)):
        try:
            # A CSV file has only texts.
            difficulty = (
                float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
            )
        except ValueError:
            difficulty = math.nan
        if not math.isfinite(difficulty):
            fault = "missing" if value is None else f"{value!r}, which is not a number"
            raise DataError(
                f"prompt {prompts[row].uid!r}: `{field}` is {fault}",
                location="data.curriculum",
                hint="name a field with a number in every row",
            )
        difficulties.append(difficulty)
    return difficulties
