"""Every data set of reasoning-gym as a ready task: ``gym/chain_sum``, ``gym/countdown``, ...

Questions and verifiers are reasoning-gym's. Here they become prompts of two splits.

Invariant: which split a question belongs to is a hash of its text (``prompts.is_held_out``), so what is held out is
never trained on, however few different questions a data set has. ``_index`` alone draws rows.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.core.suggest import closest
from asyncrl_cli.records.prompt import Message, Prompt
from asyncrl_cli.tasks.base import Split
from asyncrl_cli.tasks.prompts import LazyPrompts, is_held_out

ROWS = 2**40
"""Rows of a data set. They are computed from their index, so a task draws indices from all of this range."""
Extract = Literal["answer", "tag", "last_line", "whole"]
HeldOutBy = Literal["question", "row"]
HELD_OUT_ONE_IN = 4
"""One question in this many is held out: some data sets take seconds to make one."""
TRIES = 200
"""Questions drawn for one row before a data set counts as too small to hold some out."""


class Gym:
    """The task ``gym/<data set>``. Options that are not its own are the data set's."""

    def __init__(
        self,
        data_set: str,
        extract: Extract = "answer",
        partial: bool = False,
        system: str | None = None,
        template: str = "{question}",
        rows: int = 2**14,
        held_out_by: HeldOutBy = "question",
        **config: Any,
    ) -> None:
        """docs/tasks.md describes the options; ``config`` are the data set's.

        Raises ``TaskError`` for an unknown data set or option, ``ValueError`` for impossible values.
        """
        if extract not in get_args(Extract):
            raise ValueError(f"extract must be one of {', '.join(get_args(Extract))}, not {extract!r}")
        if held_out_by not in get_args(HeldOutBy):
            raise ValueError(f"held_out_by must be question or row, not {held_out_by!r}")
        if "{question}" not in template:
            raise ValueError("template must have {question} in it")
        if rows < 1:
            raise ValueError(f"rows must be 1 or more, not {rows}")
        names = data_set_names(f"gym/{data_set}")
        if data_set not in names:
            close = closest(data_set, names)
            raise TaskError(
                f"reasoning-gym has no data set {data_set!r}",
                location="task.use",
                hint=f"did you mean `gym/{close[0]}`?" if close else f"it has {', '.join(sorted(names))}",
            )
        self._name = data_set
        self._extract = extract
        self._partial = partial
        self._system = system
        self._template = template
        self._rows = rows
        self._by_row = held_out_by == "row"
        self._data = procedural_data(data_set, rows, **config)
        # Prompts are looked at more than once, and some are expensive.
        self._entry = lru_cache(maxsize=2048)(self._data.__getitem__)

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        """``size`` rows of the split; row ``i`` is the same at every size. One question may fill several rows."""

        def row(number: int) -> Prompt:
            uid = f"{self._name}/{split}/{number}"
            index = self._index(uid, split)
            entry = self._entry(index)
            # The rest of an entry can be made again, and is not always JSON.
            return Prompt(uid, self._content(entry["question"]), {"row": index, "answer": str(entry["answer"])})

        return LazyPrompts(size, row)

    def reward(self, prompt: Prompt, response: str, finished: bool) -> float:
        """The score of the response's answer; 0.0 for one that is truncated, or that the verifier cannot read."""
        answer = _answer(response, self._extract) if finished else None
        if answer is None:
            return 0.0
        try:
            score = float(self._data.score_answer(answer, self._entry(prompt.fields["row"])))
        except Exception:  # some verifiers raise for texts that are far from an answer
            return 0.0
        return score if self._partial else float(score >= 1.0)

    def _index(self, uid: str, split: Split) -> int:
        rng = random.Random(uid)
        for _ in range(TRIES):
            index = rng.randrange(self._rows)
            text = str(index) if self._by_row else self._entry(index)["question"]
            if is_held_out(text, HELD_OUT_ONE_IN) == (split == "eval"):
                return index
        raise TaskError(
            f"gym/{self._name} has too few different questions: none is left for the {split} split",
            location="task.options",
            hint="choose options that make more, or set held_out_by to row",
        )

    def _content(self, question: str) -> str | tuple[Message, ...]:
        text = self._template.replace("{question}", question)
        if self._system is None:
            return text
        return {"role": "system", "content": self._system}, {"role": "user", "content": text}


def _answer(response: str, extract: Extract) -> str | None:
    """The answer in a response; None if it has none."""
    if extract in ("answer", "tag"):
        _, opened, tagged = response.rpartition("<answer>")
        if opened:  # `</answer>` may be a stop string, and only whole responses are read
            return tagged.partition("</answer>")[0].strip()
        if extract == "tag":
            return None
    if extract == "last_line":
        lines = [line for line in response.splitlines() if line.strip()]
        return lines[-1].strip() if lines else None
    return response.strip()


def procedural_data(name: str, rows: int = ROWS, **config: Any) -> Any:
    """The reasoning-gym data set ``name``: ``data[index]`` is one of its ``rows``, ``data.score_answer`` its verifier.

    Raises ``TaskError`` where reasoning-gym is not installed, or where the data set does not take ``config``.
    """
    try:
        return _reasoning_gym(name).create_dataset(name, seed=0, size=rows, **config)
    except (TypeError, AssertionError, ValueError) as error:
        raise TaskError(
            f"the options do not fit the data set {name}: {error}",
            location="task.options",
            hint="reasoning-gym's documentation has its options",
        ) from error


def data_set_names(task: str) -> list[str]:
    """The data sets that reasoning-gym has. Raises ``TaskError`` where it is not installed, naming the ``task``."""
    _reasoning_gym(task)
    return list(importlib.import_module("reasoning_gym.factory").DATASETS)


def _reasoning_gym(task: str) -> Any:
    try:  # only now: its import takes most of a second, and it is an optional extra
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise TaskError(
            f"the task {task} needs reasoning-gym: {error}", location="task.use", hint="pip install 'asyncrl[gym]'"
        ) from error
