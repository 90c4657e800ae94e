"""Unmodified third-party programs at the gateway: every call is token-exact, and nothing is refused.

Only the tokens come from a script: a call of the program's shell, and then an answer. tests/e2e/gateway tests the same
programs while a model is trained.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import pytest

from asyncrl_cli.data.tokenizer import character_tokenizer
from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.gateway.sessions import session_url
from asyncrl_cli.records.generation import RolloutRequest
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.base import ModelAccess
from tests.e2e.gateway.installed import AGENTS, installed
from tests.e2e.gateway.program_sessions import CONTINUED, compare
from tests.gateway.gateway_stand_ins import MAX_LENGTH, MODEL, Engine, key_of, served

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "e2e/gateway"
SHELLS = {
    "mini-swe-agent": ("bash", "command"),
    "codex": ("exec_command", "cmd"),
    "claude-code": ("Bash", "command"),
    "openhands": ("terminal", "command"),
}
"""The name of each program's shell tool."""


@cache
def short_prompts() -> ChatFormat:
    """A template that keeps only the question, and the ends of results."""
    tokenizer = character_tokenizer(MAX_LENGTH)
    tokenizer.chat_template = (FOLDER / "library_agents.jinja").read_text()
    return ChatFormat(tokenizer, "hermes")


def answers(kind: str, prompt: str) -> str:
    """The model's replies: first a calculation with the shell, then the result."""
    if "<tool_call>" not in prompt and kind in SHELLS:
        tool, argument = SHELLS[kind]
        return f"<tool_call>{json.dumps({'name': tool, 'arguments': {argument: 'echo $((37*48))'}})}</tool_call>"
    if kind == "mini-swe-agent":
        command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 1776"
        return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"
    return "#1776"


@pytest.mark.parametrize("kind", ["mini-swe-agent", "codex", "claude-code", "aider", "openhands"])
async def test_unmodified_programs_are_served(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, missing = installed()
    if kind in missing:
        pytest.skip(missing[kind])
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "program_agents", raising=False)
    from program_agents import Agents  # type: ignore[import-not-found]

    log = tmp_path / "log"
    agents = Agents(str(log), str(AGENTS / "bin"), [kind])
    prompt = Prompt("row/1", "37*48=", {"answer": 1776})

    def say(text: str, request: RolloutRequest) -> str:
        return answers(kind, text)

    async with served(Engine(say, chat=short_prompts()), plain=False) as there:
        session = there.session("7-0")
        access = ModelAccess(session_url(there.gateway.url, "7-0"), key_of("7-0"), MODEL, "7-0")
        await agents.run(prompt, access)
        (row,) = map(json.loads, log.read_text().splitlines())
        rollout = session.rollout()
        assert rollout is not None, row
        sequences = {str(number): sequence for number, sequence in enumerate(rollout.sequences)}
        found = compare(row, sequences, short_prompts().decode)
        assert not found.problems, "\n".join(found.problems)
        if kind in SHELLS:
            assert found.counts["replies with tool calls"] and found.counts[CONTINUED], "the second call continues it"
