"""Recorded requests of real clients get exactly the recorded answers, streamed or not.

The requests in golden/ come from Codex, Claude Code and the libraries of OpenAI and Anthropic. Long texts in them are
shortened. `GOLDEN=write` records the answers again, after an intended change to the answers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.rollout.client import GenerationFailed
from tests.gateway.gateway_stand_ins import Engine, Served, chat_format, key_of, served
from tests.gateway.test_programs import short_prompts

pytestmark = pytest.mark.slow

FILES = sorted((Path(__file__).parent / "golden").glob("*.json"))
RANDOM = re.compile(r"(?<=[_-])(?:[0-9a-f]{32}|[0-9a-f]{24})(?![0-9a-f])")
"""Random parts of ids. The files have `#0`, `#1`, ... instead, in order of appearance."""
TIMES = re.compile(r'("created(?:_at)?"): ?(?:\d+|"[^"]*")')


class Replay:
    """Sends the requests of a file one after the other, and gives the model's next scripted reply to each choice."""

    def __init__(self) -> None:
        self.replies: Iterator[str | None] = iter(())
        self.ids: dict[str, str] = {}

    def script(self, *_: Any) -> str:
        reply = next(self.replies)
        if reply is None:
            raise GenerationFailed("no engine")
        return reply

    async def answer(self, there: Served, exchange: dict[str, Any]) -> tuple[int, Any]:
        method, path, body = exchange["request"]
        self.replies = iter(exchange["replies"])
        names = {name: value for value, name in self.ids.items()}
        sent = re.sub(r"(?<=[_-])#\d+", lambda found: names[found[0]], json.dumps(body))
        session = found[1] if (found := re.match(r"/sessions/([^/]+)", path)) else None
        headers = {"Authorization": f"Bearer {key_of(session)}"}
        if exchange.get("anthropic"):
            headers["anthropic-version"] = "2023-06-01"
        answer = await there.http.request(method, path, content=sent if body is not None else None, headers=headers)
        text = RANDOM.sub(lambda found: self.ids.setdefault(found[0], f"#{len(self.ids)}"), answer.text)
        text = TIMES.sub(r"\1:0", text)
        if not answer.headers["content-type"].startswith("text/event-stream"):
            return answer.status_code, json.loads(text)
        return answer.status_code, [_event(block) for block in text.removesuffix("\n\n").split("\n\n")]


def _event(block: str) -> Any:
    """An event's data, after its name if it has one."""
    lines = dict(line.split(": ", 1) for line in block.split("\n"))
    data = lines["data"] if lines["data"] == "[DONE]" else json.loads(lines["data"])
    return [lines["event"], data] if "event" in lines else data


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
async def test_recorded_requests_get_the_recorded_answers(file: Path) -> None:
    golden = json.loads(file.read_text())
    chat = short_prompts() if golden["program"] else chat_format(golden["reasoning_parser"])
    replay = Replay()

    async with served(Engine(replay.script, chat=chat)) as there:
        sessions = [there.session(name) for name in ("7-0", "7-1")]
        for exchange in golden["exchanges"]:
            status, answer = await replay.answer(there, exchange)
            if os.environ.get("GOLDEN") == "write":
                exchange |= {"status": status, "answer": answer}
            assert (status, answer) == (exchange["status"], exchange["answer"]), exchange["request"]
        rollouts = [session.rollout() for session in sessions]
        sequences = [len(rollout.sequences) if rollout else 0 for rollout in rollouts]
        assert golden.setdefault("sequences", sequences) == sequences, "conversations continue their tokens"
    if os.environ.get("GOLDEN") == "write":
        exchanges = ",\n".join(json.dumps(exchange, ensure_ascii=False) for exchange in golden.pop("exchanges"))
        file.write_text(json.dumps(golden)[:-1] + f', "exchanges": [\n{exchanges}\n]}}\n')
