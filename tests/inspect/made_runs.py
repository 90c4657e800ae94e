"""Simulated runs with a known limit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.journal.schema import FILE, open_for_writing
from asyncrl_cli.plan.prediction import Limit
from asyncrl_cli.records.generation import training_rollout_id
from asyncrl_cli.records.groups import Outcome
from asyncrl_cli.records.rewards import Scored
from asyncrl_cli.runs.directory import RunDirectory
from tests.journal import recorded_run
from tests.journal.recorded_run import RecordedRun, make_run, settings


@dataclass(frozen=True, slots=True)
class Situation:
    """Durations in seconds of a group's generation (every seventh group: ``straggler_s``) and reward (one scorer), and
    of a step's training and publish; the number of groups that run in parallel; and the limit of the run's speed (None:
    no simulation reproduces it)."""

    limit: Limit | None
    group_s: float = 2.0
    straggler_s: float | None = None
    reward_s: float = 0.0
    train_s: float = 2.0
    publish_s: float = 0.1
    at_once: int = 8
    engines_busy: float = 0.9


SITUATIONS: Mapping[str, Situation] = {
    "slow trainer": Situation("trainer", train_s=20.0, engines_busy=0.2),
    "slow engines": Situation("engines", group_s=30.0, at_once=2),
    "slow reward": Situation(None, reward_s=10.0, engines_busy=0.2),
    "slow publishing": Situation("publish", publish_s=20.0),
    "tight bound": Situation("bound", straggler_s=20.0, engines_busy=0.9),
}


class ScoredRun(RecordedRun):
    """A run that scores its groups one after another after their generation, with ``reward_s`` each."""

    def __init__(self, *arguments: Any, reward_s: float) -> None:
        self._reward_s = reward_s
        self._scorer_free_at = 0.0
        self._generated: set[int] = set()
        super().__init__(*arguments)

    def _end_first(self) -> None:
        self.now, group_id = heappop(self._ends)
        indices = range(self.settings.group_size)
        if group_id not in self._generated:
            self._generated.add(group_id)
            self.book.record(self.rollout(group_id, index) for index in indices)
            if self._reward_s:
                self._scorer_free_at = max(self._scorer_free_at, self.now) + self._reward_s
                heappush(self._ends, (self._scorer_free_at, group_id))
                return
        self.book.score(Outcome(training_rollout_id(group_id, index), Scored(float(index % 2))) for index in indices)
        self.fill()


def made_run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    situation: Situation,
    steps: int = 12,
    run_id: str = "run-1",
) -> RunDirectory:
    """A run of this many steps in this situation."""
    monkeypatch.setattr(recorded_run, "TRAIN_S", situation.train_s)
    monkeypatch.setattr(recorded_run, "PUBLISH_S", situation.publish_s)
    metrics = recorded_run.METRICS | {"share/engines_busy": situation.engines_busy, "reward/mean": 0.5}
    monkeypatch.setattr(recorded_run, "METRICS", metrics)
    run = make_run(folder, run_id)

    def seconds(group: int) -> float:
        return situation.straggler_s if situation.straggler_s and group % 7 == 2 else situation.group_s

    recorded = ScoredRun(
        run.path / FILE,
        monkeypatch,
        settings(max_staleness=2),
        seconds,
        situation.at_once,
        reward_s=situation.reward_s,
    )
    for _ in range(steps):
        recorded.step()
    recorded.book.journal.close()
    return run


def vary_metrics(run: RunDirectory, names: Iterable[str]) -> None:
    """Give each of these metrics a different value in every step: constant metrics are not drawn."""
    journal = open_for_writing(run.path / FILE)
    for step, text in journal.execute("SELECT step, metrics FROM batches WHERE metrics IS NOT NULL").fetchall():
        values = {name: (step + 1) / 20 + at / 100 for at, name in enumerate(names)}
        metrics = values | {"time/step_s": 10.0 + step / 10}
        journal.execute("UPDATE batches SET metrics = ? WHERE step = ?", (json.dumps(json.loads(text) | metrics), step))
    journal.close()
