"""Programs outside of a real run bring their own prompts."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from asyncrl_cli.journal.schema import FILE, open_for_reading
from tests.e2e.conftest import Runs, until
from tests.e2e.faults.campaign import KINDS, OUTSIDE

pytestmark = [pytest.mark.stack, pytest.mark.rotating]


def test_programs_bring_their_own_prompts(runs: Runs, tmp_path: Path) -> None:
    sections = {
        **KINDS[OUTSIDE],
        "data": {"train": {"size": 1}, "eval": None},
        "algorithm": {"preset": "single_rollout"},
    }
    sections["rollout"] = {**KINDS[OUTSIDE]["rollout"], "group_size": 1}
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
