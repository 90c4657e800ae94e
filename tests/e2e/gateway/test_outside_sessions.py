"""Programs outside of a real run: 64 at once, killed ones, a killed driver, and own prompts."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import httpx
import pytest

from asyncrl_cli.journal.schema import FILE, open_for_reading
from tests.e2e.conftest import Runs, steps_of, until
from tests.e2e.gateway.outside_campaign import SPEC, disturbed

pytestmark = [pytest.mark.stack, pytest.mark.rotating]


def test_every_token_of_outside_programs_is_accounted_for(runs: Runs) -> None:
    """``python -m tests.e2e.gateway.campaign --outside`` has more sessions and kills."""
    run, audited = disturbed(runs, steps=5, kills=1)
    assert stat.S_IMODE((run / "sessions.json").stat().st_mode) == 0o600
    assert [row["step"] for row in steps_of(run)] == list(range(1, 6))
    assert not audited.problems, f"{audited}\n" + "\n".join(audited.problems)
    assert audited.counts["rewarded sessions in trained groups"] >= 5 * 8 * 2
    assert audited.counts["starts"] == 2
    assert audited.counts["branches"] == 0, "each program had one conversation, before and after the kill"


def test_programs_bring_their_own_prompts(runs: Runs, tmp_path: Path) -> None:
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
