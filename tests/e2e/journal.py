"""What a run's journal says about its training."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from asyncrl_cli.journal.schema import FILE, open_for_reading


@dataclass(frozen=True)
class Step:
    """A step that was taken, counted from 1. ``digest`` is None until it is trained."""

    number: int
    digest: str | None
    uids: tuple[str, ...]


def steps_of(run: Path) -> list[Step]:
    """The steps of a run, in order."""
    with closing(open_for_reading(run / FILE)) as journal:
        return [
            Step(
                step + 1,
                digest,
                tuple(uid for (uid,) in journal.execute("SELECT uid FROM groups WHERE step = ? ORDER BY id", (step,))),
            )
            for step, digest in journal.execute("SELECT step, digest FROM batches ORDER BY step").fetchall()
        ]


def probe_gaps(run: Path) -> dict[int, float]:
    """By the step after which it was published, how far an engine's log-probs of a version were from the
    trainer's; without the version that the run began with."""
    with closing(open_for_reading(run / FILE)) as journal:
        return dict(journal.execute("SELECT step, gap FROM publishes WHERE version > 0 ORDER BY version").fetchall())
