"""A run with faults until its end: it is resumed whenever its driver dies, and snapshots of its journal are taken."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl_cli.journal.schema import FILE, JournalError, open_for_reading
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.system.reaper import marked_processes
from tests.e2e.conftest import Runs, mark_of
from tests.e2e.faults.evidence import Evidence
from tests.e2e.faults.moments import MOMENTS
from tests.e2e.faults.parts import processes_of_part

QUIET_S = 600.0
"""Seconds without a new trained step after which a run counts as hung."""
POLL_S = 0.05


class Ended(Exception):
    """The driver ended before the awaited event."""


class Hung(Exception):
    """A run that neither trains nor ends."""


@dataclass(frozen=True, slots=True)
class Driver:
    """A driver's process, and the file with its output."""

    process: subprocess.Popen[bytes]
    output: Path


@dataclass(slots=True)
class Kill:
    """One kill: ``at`` is its time in unix seconds, ``step`` the number of steps trained before it, ``back_s`` the
    seconds until the next step was trained."""

    part: str
    moment: str
    at: float
    step: int
    back_s: float | None = None


@dataclass(slots=True)
class DisturbedRun:
    """A run of one spec. ``stops`` are the messages of drivers that ended by themselves with an error."""

    runs: Runs
    spec: Path
    steps: int
    random: random.Random
    say: Callable[[str], None] = print
    kills: list[Kill] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    resumes: int = 0
    evidence: Evidence = field(default_factory=Evidence)
    marks: set[str] = field(default_factory=set)
    _process: subprocess.Popen[bytes] | None = None
    _output: Path | None = None
    _folder: Path | None = None
    _moved: tuple[int, float] = (0, 0.0)

    # -- the run

    @property
    def folder(self) -> Path:
        assert self._folder is not None
        return self._folder

    @property
    def journal(self) -> Path:
        return self.folder / FILE

    def start(self) -> None:
        """Start it, and return once it has a folder."""
        known = set(self.runs.folder.glob("*/manifest.json"))
        self._begin("train", self.spec)
        (manifest,) = self.until(lambda: set(self.runs.folder.glob("*/manifest.json")) - known, "the run's folder")
        self._folder = manifest.parent

    def resume(self, *options: str) -> None:
        self.resumes += 1
        self._begin("resume", self.folder.name, "--runs-dir", self.runs.folder, *options)

    def resume_beside(self) -> Driver:
        """Start a new driver next to the present one, which may live."""
        return self._start("resume", self.folder.name, "--runs-dir", self.runs.folder)

    def follow(self, driver: Driver) -> None:
        """Watch this driver from now on."""
        self.resumes += 1
        self._process, self._output = driver.process, driver.output

    def interrupt(self) -> None:
        """Press Ctrl-C. The driver must end, and say in one line how to resume the run."""
        os.kill(self.pid, signal.SIGINT)
        with suppress(Ended):
            self.until(lambda: False, "the end")
        printed = self.printed()
        assert self.code == 130, printed
        assert f"asyncrl resume {self.folder}" in printed
        assert "Traceback" not in printed
        assert RunDirectory(self.folder).state.phase == "interrupted"
        self.evidence.take_snapshot(self.journal)

    def finish(self, resumes: int = 5) -> None:
        """Wait for its end. A driver that ends with an error is noted in ``stops``; at most ``resumes`` are started."""
        for _ in range(resumes):
            try:
                self.until(lambda: False, "the end")
            except Ended:
                # The last kill may come after all work is done: then there is nothing to resume, which is exit code 2.
                if self.code == 0 or (self.code == 2 and RunDirectory(self.folder).state.phase == "finished"):
                    self.evidence.take_snapshot(self.journal)
                    return
            self.note_stop()
            self.resume()
        raise Hung(f"resumed {resumes} times, and it ended with an error every time")

    def note_stop(self) -> None:
        self.stops.append(f"exit {self.code}: {self.printed().strip().splitlines()[-1:]}")
        self.say(f"    the driver stopped: {self.stops[-1]}")

    def end(self) -> None:
        """Make sure that no driver is running."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self.pid, signal.SIGINT)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    @property
    def code(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def printed(self) -> str:
        assert self._output is not None
        return self._output.read_text(errors="replace")

    # -- its progress

    def trained(self) -> int:
        """The number of steps that the journal records as trained."""
        return int(self.ask("SELECT count(*) FROM batches WHERE trained_at IS NOT NULL") or 0)

    def taken(self) -> int:
        """The number of batches that were taken."""
        return int(self.ask("SELECT count(*) FROM batches") or 0)

    def ask(self, query: str) -> Any:
        """The first value of a query on the journal; None while there is none."""
        if self._folder is None or not self.journal.is_file():
            return None
        try:
            with closing(open_for_reading(self.journal)) as connection:
                return connection.execute(query).fetchone()[0]
        except JournalError:  # not yet complete
            return None

    @property
    def mark(self) -> str:
        """The mark of the present driver's processes; empty before there are any."""
        mark = mark_of(self.pid) if self.code is None else ""
        if mark:
            self.marks.add(mark)
        return mark

    def pids(self, part: str) -> list[int]:
        if part == "driver":
            return [self.pid] if self.code is None else []
        mark = self.mark
        return processes_of_part(mark, part) if mark else []

    def until(self, condition: Callable[[], Any], what: str, poll_s: float = POLL_S) -> Any:
        """The first true answer. Raises ``Ended`` when the driver ends first, ``Hung`` when no step is trained."""
        self._moved = (self.trained(), time.monotonic())
        watched = time.monotonic()
        while True:
            if answer := condition():
                return answer
            if self.code is not None:
                raise Ended
            if time.monotonic() - watched > 1.0:
                watched = time.monotonic()
                self._watch(what)
            time.sleep(poll_s)

    def pause(self, seconds: float) -> None:
        """Wait for this many seconds. Raises ``Ended``."""
        deadline = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= deadline, "a moment", poll_s=0.005)

    # -- faults

    def inject(self, part: str, moment: str, signal_number: int = signal.SIGKILL) -> bool:
        """Kill one process of a part at a moment (a name in ``MOMENTS``), and resume the run if it was the driver.

        Returns False if the run was complete before the moment. A driver that ends with an error meanwhile is resumed.
        """

        def kill() -> None:
            self.strike(part, moment, signal_number)
            if part == "driver":
                self.resume()

        return self.insist(kill)

    def insist(self, fault: Callable[[], None]) -> bool:
        """Inject a fault. If the driver ends with an error before, resume the run and try again.

        Returns False if the run was complete before.
        """
        while True:
            try:
                fault()
                return True
            except Ended:
                if self.code == 0:
                    return False
                self.note_stop()
                self.resume()

    def strike(self, part: str, moment: str, signal_number: int = signal.SIGKILL) -> None:
        """Kill one process of a part at a moment. Raises ``Ended`` if the driver ends before it."""
        coming = MOMENTS[moment](self)
        next(coming)
        while True:
            pid = self.random.choice(self.until(lambda: self.pids(part), f"a process of the {part}"))
            _ = self.mark  # read it now: it cannot be found once the driver is dead
            self.evidence.take_snapshot(self.journal)
            step = self.trained()
            next(coming, None)
            try:
                os.kill(pid, signal_number)
            except ProcessLookupError:
                continue  # it has just ended by itself
            self.kills.append(Kill(part, moment, time.time(), step))
            if part == "driver":
                self.await_cleanup()
            else:
                self.evidence.take_snapshot(self.journal)
            return

    def await_cleanup(self) -> None:
        """After the driver's death: wait until none of its processes lives, and take a snapshot."""
        assert self._process is not None
        self._process.wait()
        deadline = time.monotonic() + 60
        while self.living():
            if time.monotonic() > deadline:
                raise Hung(f"processes outlive their driver: {self.living()}")
            time.sleep(POLL_S)
        self.evidence.take_snapshot(self.journal)

    def living(self) -> list[int]:
        """Processes of this run, of all its drivers."""
        return [pid for mark in self.marks for pid in marked_processes(mark)]

    def measure(self) -> None:
        """Fill in how long after each kill the next step was trained."""
        with closing(open_for_reading(self.journal)) as connection:
            for kill in self.kills:
                query = "SELECT min(trained_at) FROM batches WHERE trained_at > ?"
                (at,) = connection.execute(query, (kill.at,)).fetchone()
                kill.back_s = None if at is None else at - kill.at

    def _begin(self, *arguments: str | Path) -> None:
        driver = self._start(*arguments)
        self._process, self._output = driver.process, driver.output

    def _start(self, *arguments: str | Path) -> Driver:
        path = self.runs.folder / f"driver-{len(list(self.runs.folder.glob('driver-*')))}.out"
        with path.open("wb") as output:
            process = subprocess.Popen(
                self.runs.command(*arguments),
                cwd=self.runs.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"COLUMNS": "120"},
            )
        return Driver(process, path)

    def _watch(self, what: str) -> None:
        _ = self.mark  # read it now: it cannot be found once the driver is dead
        trained, now = self.trained(), time.monotonic()
        if trained > self._moved[0]:
            self._moved = (trained, now)
        if now - self._moved[1] > QUIET_S:
            raise Hung(f"waited {QUIET_S:.0f} s for {what} and no step was trained\n{self.printed()[-3000:]}")
