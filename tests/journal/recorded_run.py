"""A complete run in a journal without engines and trainers: the buffer's real code with a simulated clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.records.generation import CONTEXT, Rollout, branch_id, training_rollout_id
from asyncrl_cli.records.groups import BufferSettings, Candidate, Outcome, PublishRecord, StepRecord
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import Scored
from asyncrl_cli.runs.directory import RunDirectory
from tests.journal.buffer_stand_ins import SETTINGS

STARTED = 1_790_000_000.0
TRAIN_S, PUBLISH_S = 4.0, 1.0
METRICS = {
    "tokens/trained": 100.0,
    "tokens/generated": 200.0,
    "time/step_s": 10.0,
    "share/trainer_busy": 0.5,
    "share/engines_busy": 0.75,
    "share/engines_paused": 0.25,
}


def settings(**changes: object) -> BufferSettings:
    """Two groups of two rollouts per step, a version every step, a staleness of at most 1."""
    return replace(SETTINGS, **({"reject_uniform": False} | changes))  # type: ignore[arg-type]


class RecordedRun:
    """A run: ``step`` acts like the orchestrator, and everything is written to the journal.

    Group g runs for ``seconds(g)``; ``concurrency`` groups run at a time. If a version is published during this
    time, the group's rollouts have tokens of both versions. ``response`` has each rollout's token ids. Rewards are
    0, 1, 0, 1, ...
    """

    prompt_ids: tuple[int, ...] = (9, 9, 9)
    metrics: Mapping[str, float] = {}  # the task's metrics

    def __init__(
        self,
        path: Path,
        monkeypatch: pytest.MonkeyPatch,
        of: BufferSettings,
        seconds: Callable[[int], float],
        concurrency: int = 8,
        response: Sequence[int] = (5, 6, 7, 1),
    ) -> None:
        self.now = STARTED
        monkeypatch.setattr("asyncrl_cli.journal.writer.time", SimpleNamespace(time=lambda: self.now))
        self.settings = of
        self.waited: list[float] = []
        self._path = path
        self._seconds, self._concurrency, self._response = seconds, concurrency, response
        self._ends: list[tuple[float, int]] = []
        self._admitted_at: dict[int, int] = {}
        self._serial = 0
        self.book = self._open("train")
        self._publish_record(0)
        self.fill()

    def step(self) -> None:
        """Wait for a batch, train it, and publish a version if one is due."""
        asked = self.now
        step = self.take()
        self.waited.append(self.now - asked)
        self.pass_time(TRAIN_S)
        ledger = self.book.ledger
        trained = self.now
        if ledger.publish_due:
            self.pass_time(PUBLISH_S)
            self._publish_record(ledger.version + 1)
            self.fill()
        metrics = {**METRICS, "time/publish_s": self.now - trained}
        self.book.journal.trained(StepRecord(step, f"digest {step}", metrics))
        self.commit()

    def take(self) -> int:
        """Take the next batch once it is ready. Returns its step."""
        step = self.book.ledger.step
        while (waiting := self.book.take(step)) is not None:
            for old, new, _ in self.book.requeue(waiting.overdue):
                self._ends = [end for end in self._ends if end[1] != old]
                self._started(new)
            if not waiting.overdue:
                self._end_first()
        self.commit()
        return step

    def pass_time(self, seconds: float) -> None:
        """Advance the clock, and finish the groups that end in this time."""
        until = self.now + seconds
        while self._ends and self._ends[0][0] <= until:
            self._end_first()
        self.now = until

    def crash(self, down_s: float) -> None:
        """Crash, and resume ``down_s`` seconds later; running groups continue where they were."""
        self.book.journal.close()
        self.now += down_s
        self._ends = [(end + down_s, group_id) for end, group_id in self._ends]
        self.book = self._open("resume")

    def fill(self) -> None:
        """Admit as many groups as there is room for."""
        for _ in range(min(self.book.ledger.room(), self._concurrency - len(self._ends))):
            self._serial += 1
            prompt = Prompt(f"p{self._serial}", f"question {self._serial}?", {"answer": "7"})
            where = {"epoch": 0, "position": self._serial}
            (admission,) = self.book.admit([Candidate(self._serial, prompt, self.prompt_ids, where)])
            self._started(admission.group_id)
        self.commit()

    def rollout(self, group_id: int, index: int) -> Rollout:
        """A rollout that ends now. Its first half has the version at the group's admission."""
        half = len(self._response) // 2
        versions = [self._admitted_at[group_id]] * half + [self.book.ledger.version] * (len(self._response) - half)
        return Rollout(
            rollout_id=training_rollout_id(group_id, index),
            prompt_ids=self.prompt_ids,
            ids=np.array(self._response, np.int32),
            logprobs=-np.arange(len(versions), dtype=np.float32) / 4,
            versions=np.array(versions, np.int32),
            text="",
            finish_reason="stop",
        )

    def commit(self) -> None:
        self.book.journal.commit(self.book.journal.noted())

    def _started(self, group_id: int) -> None:
        self._admitted_at[group_id] = self.book.ledger.version
        heappush(self._ends, (self.now + self._seconds(group_id), group_id))

    def _end_first(self) -> None:
        self.now, group_id = heappop(self._ends)
        indices = range(self.settings.group_size)
        self.book.record(self.rollout(group_id, index) for index in indices)
        self.book.score(
            Outcome(training_rollout_id(group_id, index), Scored(float(index % 2), self.metrics)) for index in indices
        )
        self.fill()

    def _publish_record(self, version: int) -> None:
        step = self.book.ledger.step
        self.book.publish(PublishRecord(version, step, f"checksum {version}", PUBLISH_S, 0.1, 1e-5, 0.1))
        self.commit()

    def _open(self, kind: str) -> DurableLedger:
        book = DurableLedger(self._path, self.settings)
        book.start(kind, "")
        book.opening()
        book.journal.commit(book.journal.noted())
        return book


class EpisodeRun(RecordedRun):
    """A run of episodes: two calls with two ``tool`` tokens between them, and a branch with one call.

    Each of the two calls samples half of ``response``; the branch samples all of it.
    """

    prompt_ids = ()
    metrics: Mapping[str, float] = {"turns": 3.0, "seconds": 0.5}
    asked: Sequence[int] = (11, 12, 13)
    tool: Sequence[int] = (14, 15)

    def rollout(self, group_id: int, index: int) -> Rollout:
        """As in the base class, but with given tokens between the two calls."""
        answered = super().rollout(group_id, index)
        half = len(self._response) // 2
        calls = answered.ids[:half], answered.ids[half:]
        old, new = answered.versions[:half].tolist(), answered.versions[half:].tolist()
        root = self._episode(
            answered, [*self.asked, *calls[0], *self.tool, *calls[1]], [CONTEXT] * 3 + old + [CONTEXT] * 2 + new
        )
        ids = [*self.asked, *answered.ids]
        branch = self._episode(answered, ids, [CONTEXT] * 3 + [self.book.ledger.version] * len(self._response))
        return replace(root, branches=(replace(branch, rollout_id=branch_id(root.rollout_id, 1)),))

    def _episode(self, of: Rollout, ids: Sequence[int], versions: Sequence[int]) -> Rollout:
        logprobs = [0.0 if version == CONTEXT else -0.25 for version in versions]
        return replace(
            of,
            ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            versions=np.array(versions, np.int32),
        )


def make_run(runs_dir: Path, run_id: str = "run-1", **state: object) -> RunDirectory:
    """A run's folder, without a driver."""
    run = RunDirectory(runs_dir / run_id)
    run.path.mkdir(parents=True)
    manifest = {
        "started": "2026-09-21T13:33:20+00:00",
        "command": ["/bin/asyncrl", "train", "spec.yaml"],
        "spec_file": "/home/me/spec.yaml",
        "host": "box",
        "cpus": 2,
        "python": "3.11.2",
        "asyncrl": "0.1",
        "packages": {"torch": "2.11", "pydantic": "2.12"},
        "git": {"commit": "0123456789abcdef", "dirty": True},
    }
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    run.update(**({"phase": "finished", "step": 3, "steps": 3, "version": 3} | state))
    return run
