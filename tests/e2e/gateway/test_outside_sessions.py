"""Programs outside of a real run: 64 at once, killed ones, and a killed driver."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from asyncrl_cli.journal.schema import FILE, open_for_reading
from tests.e2e.conftest import ROOT, Runs, mark_of, processes_of, steps_of, until
from tests.e2e.gateway.outside_programs import audit
from tests.small_models import UNTRAINED

pytestmark = pytest.mark.stack

SPEC: dict[str, Any] = {
    "name": "outside",
    "model": {**UNTRAINED, "max_length": 128},
    "task": {"use": "external", "episode": {"timeout_s": 20}},
    "data": {"train": {"path": str(ROOT / "templates/agent/prompts.jsonl")}, "eval": None},
    "rollout": {"group_size": 4, "max_running_rollouts": 64, "max_prompt_tokens": 16, "max_response_tokens": 12},
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


def test_every_token_of_outside_programs_is_accounted_for(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    driver = runs.start("train", runs.write_spec(**SPEC, stop={"steps": 6}))
    programs: list[subprocess.Popen[bytes]] = []
    try:
        (access,) = until(lambda: list(tmp_path.glob("*/sessions.json")), "the run's address")
        assert stat.S_IMODE(access.stat().st_mode) == 0o600
        programs = [start_programs(runs, access, 48), start_programs(runs, access, 16)]
        run = access.parent
        until(lambda: rewarded(run) >= 20, "rewards")
        programs[1].kill()  # its sessions are masked at their deadlines
        until(lambda: len(steps_of(run)) >= 2, "a step")
        kill_driver(driver)
        address = json.loads(access.read_text())
        driver = runs.start("resume", run)
        ended = runs.wait(driver)
        assert ended.code == 0, ended.out + ended.err + runs.logs()
        programs[0].wait(300)
        assert json.loads(access.read_text()) == address, "a resumed run has the same address"
    finally:
        for program in programs:
            program.kill()
            program.wait()
        driver.kill()
        driver.communicate()
    assert [row["step"] for row in steps_of(run)] == list(range(1, 7))
    audited = audit(run, tmp_path / "log.jsonl")
    assert not audited.problems, f"{audited}\n" + "\n".join(audited.problems)
    assert audited.counts["rewarded sessions in trained groups"] >= 6 * 8 * 2
    assert audited.counts["starts"] == 2
    assert audited.counts["branches"] == 0, "each program had one conversation, before and after the kill"


def test_programs_bring_their_own_prompts(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    sections = {**SPEC, "data": {"train": {"size": 1}, "eval": None}, "algorithm": {"preset": "single_rollout"}}
    sections["rollout"] = {**SPEC["rollout"], "group_size": 1}
    driver = runs.start("train", runs.write_spec(**sections, stop={"steps": 1}))
    try:
        (file,) = until(lambda: list(tmp_path.glob("*/sessions.json")), "the run's address")
        access = json.loads(file.read_text())
        with httpx.Client(base_url=access["url"], timeout=120, trust_env=False) as http:
            for number in range(8):
                own = {"prompt": f"{number}+1=", "fields": {"answer": number + 1}}
                token = {"authorization": f"Bearer {access['token']}"}
                session = http.post("/sessions", json=own, headers=token).json()
                assert session["prompt"]["answer"] == number + 1
                key = {"authorization": f"Bearer {session['api_key']}"}
                rewarding = f"/sessions/{session['session']}/reward"
                assert http.post(rewarding, json={"reward": 1.0}, headers=key).json()["error"]["code"] == "no_reply"
                call = {"model": "policy", "messages": [{"role": "user", "content": own["prompt"]}]}
                http.post(f"{session['base_url']}/chat/completions", json=call, headers=key).raise_for_status()
                assert http.post(rewarding, json={"reward": number / 8}, headers=key).status_code == 200
        ended = runs.wait(driver)
        assert ended.code == 0, ended.out + ended.err + runs.logs()
    finally:
        driver.kill()
        driver.communicate()
    with open_for_reading(file.parent / FILE) as journal:
        rows = journal.execute(
            "SELECT prompt, reward FROM groups JOIN rollouts ON group_id = id ORDER BY id"
        ).fetchall()
    assert [reward for _, reward in rows] == [number / 8 for number in range(8)]
    assert "3+1=" in rows[3][0]
