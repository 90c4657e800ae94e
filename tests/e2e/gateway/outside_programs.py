"""Programs outside of a run, and the comparison of their logs with the journal.

    python -m tests.e2e.gateway.outside_programs RUN/sessions.json LOG --sessions 64

plays that many sessions at a time until the run ends. Each session has up to three calls. A call that the run did not
answer is repeated, also while the run is down, and so is a reward.

``audit`` checks that every token is accounted for: a rewarded session's rollout has the program's reward and exactly
the sampled tokens that the program received, each reply once and unchanged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx

from asyncrl_cli.journal.queries import snapshot
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.records.generation import CONTEXT, TokenSequence
from tests.e2e.gateway.program_sessions import Findings
from tests.e2e.journal import groups_of, sequences_of

PATIENCE_S = 600.0
"""Seconds without any answer after which a program ends: the run is over."""


class RunOver(Exception):
    """The run answers no more."""


class Program:
    """Plays sessions, one after another."""

    def __init__(self, access: dict[str, str], log: Any, http: httpx.AsyncClient, ended: Path) -> None:
        self.access, self.log, self.http, self.ended = access, log, http, ended

    def note(self, **line: Any) -> None:
        self.log.write(json.dumps(line) + "\n")  # one write for each line: the file is open for appending
        self.log.flush()

    async def ask(self, method: str, url: str, key: str, body: Any = None) -> httpx.Response:
        """Send a request until the run answers it."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and not self.ended.exists():
            try:
                answer = await self.http.request(method, url, json=body, headers={"authorization": f"Bearer {key}"})
                if answer.status_code < 500:
                    return answer
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)
        raise RunOver

    async def work(self) -> None:
        try:
            while True:
                opened = await self.ask("POST", f"{self.access['url']}/sessions", self.access["token"], {})
                assert opened.status_code == 200, opened.text
                await self.play(opened.json())
        except RunOver:
            pass

    async def play(self, session: dict[str, Any]) -> None:
        name, key = session["session"], session["api_key"]
        self.note(session=name, event="opened")
        messages = [{"role": "user", "content": session["prompt"]["prompt"]}]
        for turn in range(random.randint(1, 3)):
            body = {"model": session["model"], "messages": messages, "return_token_ids": True}
            answer = await self.ask("POST", f"{session['base_url']}/chat/completions", key, body)
            if answer.status_code != 200:
                self.note(session=name, event="refused", status=answer.status_code, text=answer.text)
                return
            choice = answer.json()["choices"][0]
            self.note(
                session=name, event="reply", prompt=answer.json()["prompt_token_ids"], sampled=choice["token_ids"]
            )
            messages += [choice["message"], {"role": "user", "content": f"turn {turn}>"}]
        reward = random.random()
        answer = await self.ask("POST", f"{self.access['url']}/sessions/{name}/reward", key, {"reward": reward})
        self.note(session=name, event="rewarded", reward=reward, status=answer.status_code, text=answer.text)


async def play_sessions(access_file: Path, log: Path, sessions: int) -> None:
    access = json.loads(access_file.read_text())
    limits = httpx.Limits(max_connections=None)
    with log.open("a") as lines:
        async with httpx.AsyncClient(timeout=120, limits=limits, trust_env=False) as http:
            program = Program(access, lines, http, access_file.with_name("model"))
            await asyncio.gather(*(program.work() for _ in range(sessions)))


def audit(run: Path, log: Path) -> Findings:
    """Compare the programs' log with the journal of a run."""
    audited = Findings()
    by_session: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in log.read_text().splitlines():
        event = json.loads(line)
        by_session[event["session"]].append(event)
    groups = groups_of(run)
    rollouts = {rollout.rollout_id: rollout for group in groups for rollout in group.rollouts}
    trained = {group.row.group_id for group in groups if group.row.step is not None}
    with snapshot(run / FILE) as journal:
        audited.counts["versions"] = journal.execute("SELECT count(*) FROM publishes").fetchone()[0]
        audited.counts["starts"] = journal.execute("SELECT count(*) FROM starts").fetchone()[0]
    for name, events in by_session.items():
        audited.counts["sessions"] += 1
        audited.counts["handed out twice"] += sum(event["event"] == "opened" for event in events) - 1
        rewards = [event for event in events if event["event"] == "rewarded" and event["status"] == 200]
        if not rewards:
            audited.counts["sessions without an accepted reward"] += 1
            continue
        rollout = rollouts[name]
        if rollout.reward != rewards[0]["reward"]:
            audited.problems.append(f"{name}: reward {rollout.reward}, but {rewards[0]['reward']} was accepted")
        sequences = {name: TokenSequence.join(segments) for name, segments in sequences_of(rollout).items()}
        ids = {name: tokens.ids.tolist() for name, tokens in sequences.items()}
        versions = {name: tokens.versions.tolist() for name, tokens in sequences.items()}
        replies = [event for event in events if event["event"] == "reply"]
        for number, reply in enumerate(replies):
            start, end = len(reply["prompt"]), len(reply["prompt"]) + len(reply["sampled"])
            holders = [
                sequence
                for sequence, tokens in ids.items()
                if tokens[:end] == [*reply["prompt"], *reply["sampled"]]
                and CONTEXT not in versions[sequence][start:end]
            ]
            if len(holders) != 1:
                audited.problems.append(f"{name}: reply {number} is in {len(holders)} sequences, not in one")
        received = sum(len(reply["sampled"]) for reply in replies)
        sampled = [version for each in versions.values() for version in each if version != CONTEXT]
        if received != len(sampled):
            audited.problems.append(f"{name}: {received} tokens were received, {len(sampled)} recorded as sampled")
        audited.counts["rewarded sessions"] += 1
        audited.counts["rewarded sessions in trained groups"] += int(name.split("-")[0]) in trained
        audited.counts["sampled tokens"] += len(sampled)
        audited.counts["sessions with several versions"] += len(set(sampled)) > 1
        audited.counts["branches"] += len(ids) - 1
    if audited.counts["handed out twice"]:
        audited.problems.append("sessions were handed out twice")
    return audited


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("access", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("--sessions", type=int, default=64)
    arguments = parser.parse_args()
    asyncio.run(play_sessions(arguments.access, arguments.log, arguments.sessions))
