"""The ledger's answers: the entry of a group, a batch, or the reason why there is no batch yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """One admitted group.

    Args:
        group_id: admission index; rises by one with every admission, requeued ones included.
        version: weight version at admission; none of the group's tokens is older.
        deadline: last version at which the group may be trained, ``version + max_staleness``.
    """

    group_id: int
    version: int
    deadline: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one step, in admission order.

    Args:
        step: the step t that trains them.
        version: the weight version they are trained at, w = t // k.
        group_ids: B admission indices, ascending.
        group_versions: the version each of them was admitted at.
    """

    step: int
    version: int
    group_ids: tuple[int, ...]
    group_versions: tuple[int, ...]

    @property
    def staleness(self) -> tuple[int, ...]:
        """The staleness of each group in versions, in the order of ``group_ids``."""
        return tuple(self.version - admitted_at for admitted_at in self.group_versions)


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why there is no next batch yet; ``str()`` gives a sentence.

    Args:
        kind: ``done``: all steps are taken. ``publish``: a publish is in flight, and the next version is due.
            ``groups``: fewer than B groups have finished. ``missing``: B have, but the batch has to wait for the
            groups in ``missing``, which would otherwise miss their deadline.
        finished: number of finished groups that wait to be taken.
        needed: B.
        missing: running groups, in admission order; empty unless ``kind`` is ``missing``.
    """

    kind: Literal["done", "publish", "groups", "missing"]
    finished: int
    needed: int
    missing: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind == "done":
            return "all steps are taken"
        if self.kind == "publish":
            return "the weight version before must be published first"
        if self.kind == "groups":
            return f"only {self.finished} of {self.needed} groups have finished"
        return "groups that would miss their deadline have not finished: " + ", ".join(map(str, self.missing))
