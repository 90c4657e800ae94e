"""Every data set of reasoning-gym as a ready task: ``gym/chain_sum``, ``gym/countdown``, ...

Questions and verifiers are reasoning-gym's; this module divides the questions into two splits.

Invariant: a hash of a question's text decides its split (``prompts.is_held_out``). So held-out questions are never
trained on, even if a data set has few different ones. Only ``_index`` draws rows.
"""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.core.imports import large_imports
from asyncrl_cli.core.suggest import closest
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.base import Split
from asyncrl_cli.tasks.prompts import LazyPrompts, is_held_out

ROWS = 2**40
"""Rows of a data set. They are computed from their index, so a task may draw from the whole range."""
HELD_OUT_ONE_IN = 4
"""One question in this many is held out: more than usual, because some data sets take seconds to make a question."""
TRIES = 200
"""After so many draws for one row, a data set counts as too small to hold questions out."""


class Gym:
    """The task ``gym/<data set>``. It passes options that it does not know to the data set."""

    def __init__(
        self, data_set: str, partial: bool = False, template: str = "{question}", rows: int = 2**14, **config: Any
    ) -> None:
        """docs/tasks.md describes the options; ``config``: the data set's options.

        Raises ``TaskError`` for an unknown data set or option, ``ValueError`` for invalid options.
        """
        if "{question}" not in template:
            raise ValueError("template must have {question} in it")
        if rows < 1:
            raise ValueError(f"rows must be 1 or more, not {rows}")
        _reasoning_gym(f"gym/{data_set}")
        names = importlib.import_module("reasoning_gym.factory").DATASETS
        if data_set not in names:
            close = closest(data_set, names)
            raise TaskError(
                f"reasoning-gym has no data set {data_set!r}",
                location="task.use",
                hint=f"did you mean `gym/{close[0]}`?" if close else f"it has {', '.join(sorted(names))}",
            )
        self._name = data_set
        self._partial = partial
        self._template = template
        self._rows = rows
        self._data = procedural_data(data_set, rows, **config)
        # Prompts are read more than once, and some are expensive to make.
        self._entry = lru_cache(maxsize=2048)(self._data.__getitem__)

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        """Return ``size`` rows of the split; row ``i`` is the same for every size. A question may have several rows."""

        def row(prompt_index: int) -> Prompt:
            uid = f"{self._name}/{split}/{prompt_index}"
            index = self._index(uid, split)
            entry = self._entry(index)
            text = self._template.replace("{question}", entry["question"])
            # Other fields of an entry can be made again, and may not be JSON.
            return Prompt(uid, text, {"row": index, "answer": str(entry["answer"])})

        return LazyPrompts(size, row)

    def reward(self, prompt: Prompt, response: str, finished: bool) -> float:
        """Score the text of the last ``<answer>``, or the whole response if there is none.

        0.0 if the response is truncated, or the verifier cannot read the answer.
        """
        if not finished:
            return 0.0
        # `</answer>` may be missing, because it was the stop string.
        answer = response.rpartition("<answer>")[2].partition("</answer>")[0].strip()
        try:
            score = float(self._data.score_answer(answer, self._entry(prompt.fields["row"])))
        except Exception:  # some verifiers raise for texts that do not resemble an answer
            return 0.0
        return score if self._partial else float(score >= 1.0)

    def _index(self, uid: str, split: Split) -> int:
        rng = random.Random(uid)
        for _ in range(TRIES):
            index = rng.randrange(self._rows)
            if is_held_out(self._entry(index)["question"], HELD_OUT_ONE_IN) == (split == "eval"):
                return index
        raise TaskError(
            f"gym/{self._name} has too few different questions: none is left for the {split} split",
            location="task.options",
            hint="choose options with more questions",
        )


def procedural_data(name: str, rows: int = ROWS, **config: Any) -> Any:
    """The reasoning-gym data set ``name``: ``data[index]`` is one of its ``rows``, ``data.score_answer`` its verifier.

    Raises ``TaskError`` if reasoning-gym is not installed, or the data set does not take ``config``.
    """
    try:
        return _reasoning_gym(name).create_dataset(name, seed=0, size=rows, **config)
    except (TypeError, AssertionError, ValueError) as error:
        raise TaskError(
            f"the options do not fit the data set {name}: {error}",
            location="task.options",
            hint="see reasoning-gym's documentation for the data set's options",
        ) from error


def _reasoning_gym(task: str) -> Any:
    """The package. Raises ``TaskError`` that names ``task`` if it is not installed."""
    try:  # here, because the import takes most of a second, and the package is an optional extra
        with large_imports(), warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of cellpylib, when Python compiles it
            return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise TaskError(
            f"the task {task} needs reasoning-gym: {error}", location="task.use", hint="pip install 'asyncrl[gym]'"
        ) from error
