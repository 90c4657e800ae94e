"""A run with programs outside of it, killed programs and a driver that is killed again and again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from asyncrl_cli.journal.schema import FILE, open_for_reading
from tests.e2e.conftest import ROOT, Runs, mark_of, processes_of, until
from tests.e2e.gateway.outside_programs import audit
from tests.e2e.gateway.program_sessions import Findings
from tests.small_models import UNTRAINED

SPEC: dict[str, Any] = {
    "name": "outside",
    "model": {**UNTRAINED, "max_length": 128},
    "task": {"use": "external", "episode": {"timeout_s": 30}},
    "data": {"train": {"path": str(ROOT / "templates/agent/prompts.jsonl")}, "eval": None},
    "rollout": {
        "group_size": 4,
        "max_running_rollouts": 64,
        "max_prompt_tokens": 16,
        "max_response_tokens": 12,
        "max_failed_share": 0.9,
    },
    "pipeline": {"mode": "async", "max_staleness": 2, "groups_per_step": 8},
}


def start_programs(runs: Runs, access: Path, sessions: int) -> subprocess.Popen[bytes]:
    module = "tests.e2e.gateway.outside_programs"
    command = [sys.executable, "-m", module, str(access), str(runs.folder / "log.jsonl"), "--sessions", str(sessions)]
    return subprocess.Popen(command, cwd=ROOT)


def kill_driver(process: subprocess.Popen[str]) -> None:
    mark = mark_of(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    until(lambda: not processes_of(mark), "the run's processes to end", 60)


def rewarded(run: Path) -> int:
    with open_for_reading(run / FILE) as journal:
        return int(journal.execute("SELECT count(*) FROM rollouts WHERE reward IS NOT NULL").fetchone()[0])


def disturbed(runs: Runs, steps: int, kills: int) -> tuple[Path, Findings]:
    """Train for ``steps`` while 64 programs play sessions. The driver is killed ``kills`` times, and every time some
    programs are killed first; others take their place. Returns the run's folder and the audit."""
    driver = runs.start("train", runs.write_spec(**SPEC, stop={"steps": steps}))
    programs: list[subprocess.Popen[bytes]] = []
    try:
        (access,) = until(lambda: list(runs.folder.glob("*/sessions.json")), "the run's address")
        address, run = json.loads(access.read_text()), access.parent
        programs = [start_programs(runs, access, 16) for _ in range(4)]
        for kill in range(1, kills + 1):
            victim = random.randrange(len(programs))
            until(lambda kill=kill: rewarded(run) >= 48 * kill, "rewards")  # type: ignore[misc]
            programs[victim].kill()  # its sessions are masked at their deadlines
            programs[victim].wait()
            kill_driver(driver)
            driver = runs.start("resume", run)
            programs[victim] = start_programs(runs, access, 16)
        ended = runs.wait(driver, limit_s=1800)
        assert ended.code == 0, ended.out + ended.err + runs.logs()
        for program in programs:
            program.wait(300)
        assert json.loads(access.read_text()) == address, "a resumed run has the same address"
    finally:
        for program in programs:
            program.kill()
            program.wait()
        driver.kill()
        driver.communicate()
    return run, audit(run, runs.folder / "log.jsonl")
