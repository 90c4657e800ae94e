"""Runs with processes outside of them: programs that play their prompts, and an MLflow server."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.conftest import ROOT
from tests.e2e.faults.disturbed import DisturbedRun
from tests.e2e.gateway.outside_programs import audit
from tests.e2e.gateway.program_sessions import Findings
from tests.monitors.mlflow_server import Server

PROGRAMS = 4
SESSIONS = 16
"""Sessions that each program plays at a time."""


@dataclass(slots=True)
class AgentsRun(DisturbedRun):
    """Programs outside of the run play its prompts. ``pids`` replaces the ones that were killed."""

    programs: list[subprocess.Popen[bytes]] = field(default_factory=list)
    sessions_audit: Findings | None = None

    def start(self) -> None:
        DisturbedRun.start(self)
        self.until(self.access.exists, "the run's address")
        self.programs = [self._start_program() for _ in range(PROGRAMS)]

    @property
    def access(self) -> Path:
        return self.folder / "sessions.json"

    def pids(self, part: str) -> list[int]:
        if part != "program":
            return DisturbedRun.pids(self, part)
        self.programs = [program if program.poll() is None else self._start_program() for program in self.programs]
        return [program.pid for program in self.programs]

    def finish(self, resumes: int = 5) -> None:
        address = json.loads(self.access.read_text())
        DisturbedRun.finish(self, resumes)
        for program in self.programs:
            program.wait(300)
        self.sessions_audit = audit(self.folder, self._log)
        self.say(f"  {self.sessions_audit}")
        self.evidence.contradictions += self.sessions_audit.problems
        if json.loads(self.access.read_text()) != address:
            self.evidence.contradictions.append("a resumed run has another address")

    def end(self) -> None:
        DisturbedRun.end(self)
        for program in self.programs:
            program.kill()
            program.wait()

    @property
    def _log(self) -> Path:
        return self.runs.folder / f"{self.folder.name}.sessions.jsonl"

    def _start_program(self) -> subprocess.Popen[bytes]:
        module = "tests.e2e.gateway.outside_programs"
        command = [sys.executable, "-m", module, str(self.access), str(self._log), "--sessions", str(SESSIONS)]
        return subprocess.Popen(command, cwd=ROOT)


@dataclass(slots=True)
class TrackedRun(DisturbedRun):
    """A run that sends its metrics to an MLflow server."""

    server: Server = field(kw_only=True)

    def start(self) -> None:
        self.server.start()
        DisturbedRun.start(self)

    def finish(self, resumes: int = 5) -> None:
        DisturbedRun.finish(self, resumes)
        self.evidence.contradictions += self._missing_metrics()

    def end(self) -> None:
        DisturbedRun.end(self)
        self.server.stop()

    def _missing_metrics(self) -> list[str]:
        from mlflow.tracking import MlflowClient

        ended = self.runs.run("track", self.folder.name, "--runs-dir", self.runs.folder)
        if ended.code:
            return [f"`asyncrl track`: exit {ended.code}: {ended.err.strip().splitlines()[-1:]}"]
        tracked_run = json.loads((self.folder / "mlflow.json").read_text())["run_id"]
        client = MlflowClient(tracking_uri=self.server.uri)
        steps = {metric.step for metric in client.get_metric_history(tracked_run, "reward/mean")}
        missing_steps = sorted(set(range(1, self.steps + 1)) - steps)
        status = client.get_run(tracked_run).info.status
        return [
            *([f"MLflow lacks {len(missing_steps)} steps; the first: {missing_steps[:3]}"] if missing_steps else []),
            *([f"MLflow has the status {status}"] if status != "FINISHED" else []),
        ]
