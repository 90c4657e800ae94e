"""A sequence of prompts, each created at access."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import overload

from asyncrl_cli.records.prompt import Prompt


class LazyPrompts(Sequence[Prompt]):
    """``size`` prompts; row ``i`` is made by ``make(i)`` at each access.

    So a hundred thousand prompts cost nothing until they are used, and every process sees the same ones.
    """

    def __init__(self, size: int, make: Callable[[int], Prompt]) -> None:
        if size < 1:
            raise ValueError(f"a split needs at least one prompt, not {size}")
        self._size = size
        self._make = make

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self._make(row) for row in range(self._size)[index]]
        try:
            row = range(self._size)[operator.index(index)]
        except IndexError:
            raise IndexError(f"row {index} of {self._size} prompts") from None
        return self._make(row)
