"""A real run whose policy calls tools of two MCP servers: a program of each episode, and one over HTTP."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Runs, steps_of
from tests.e2e.gateway.sessions import CALCULATOR, warm_start
from tests.e2e.gateway.test_episodes import trained
from tests.small_models import UNTRAINED

pytestmark = [pytest.mark.stack, pytest.mark.rotating]

SECRET = "a-token-that-no-file-may-have"
SERVER = """
    import sys

    from calculator import _calculated
    from mcp.server.mcpserver import Context, MCPServer

    server = MCPServer("calculator")

    @server.tool()
    def calc(e: str, context: Context) -> str:
        "One multiplication, addition or subtraction of integers."
        if len(sys.argv) > 1:
            assert context.headers["authorization"] == sys.argv[2]
        return _calculated({"function": {"name": "calc", "arguments": '{"e": "%s"}' % e}})

    server.run(**({"transport": "streamable-http", "port": int(sys.argv[1])} if len(sys.argv) > 1 else {}))
"""
TASKS = """
    from calculator import Calculator

    from asyncrl_cli.tasks.tools import ToolTask

    class Sums:
        "Prompts of the calculator."

        def __init__(self):
            self.prompts = Calculator(max_terms=2).prompts

    class Judged(Sums, ToolTask):
        def tools(self, prompt):
            return []

        def judge(self, prompt, text):
            return float(text == f"#{prompt.fields['answer']}")

    class Scored(Sums):
        def reward(self, prompt, response, finished):
            return float(response == f"#{prompt.fields['answer']}")
"""


def test_a_policy_is_trained_with_the_tools_of_mcp_servers(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(CALCULATOR / "calculator.py", tmp_path)
    for name, code in (("serve.py", SERVER), ("sums.py", TASKS)):
        (tmp_path / name).write_text(textwrap.dedent(code))
    monkeypatch.setenv("CALCULATOR_TOKEN", SECRET)
    program = {"command": sys.executable, "args": ["serve.py"]}
    with subprocess.Popen(
        [sys.executable, "serve.py", "0", f"Bearer {SECRET}"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stderr is not None
            address = next(found[0] for line in server.stderr if (found := re.search(r"http://127\S+", line)))
            remote = {"url": f"{address}/mcp", "headers": {"Authorization": "Bearer ${env:CALCULATOR_TOKEN}"}}
            run = runs.train(
                name="mcp",
                model={
                    **UNTRAINED,
                    "warm_start": warm_start(tmp_path, "Calculator(max_terms=2).demonstration(rng, True)"),
                    "max_length": 256,
                },
                task={
                    "use": None,
                    "mix": [
                        {"name": "judged", "use": "sums:Judged", "tools": {"mcp": {"calculator": program}}},
                        {"name": "scored", "use": "sums:Scored", "tools": {"mcp": {"calculator": remote}}},
                    ],
                    "episode": {"max_calls": 4, "concurrency": 8},
                },
                data={"train": {"size": 40}, "eval": {"size": 4}},
                rollout={
                    "group_size": 4,
                    "max_running_rollouts": 16,
                    "max_prompt_tokens": 16,
                    "max_response_tokens": 96,
                },
                pipeline={"groups_per_step": 4},
                stop={"steps": 2},
            )
        finally:
            server.kill()
    in_batches = trained(run)
    assert len(in_batches) == 2 * 4 * 4
    for name in ("judged", "scored"):
        member = [one.rollout for one in in_batches if one.uid.startswith(f"{name}/")]
        calls = sum(one.metrics.get("tool_calls", 0) for one in member)
        assert calls >= len(member) / 2, "the warm start taught the model to call the tool"
        assert sum(one.metrics.get("tool_errors", 0) for one in member) < calls / 2
    assert max(row["reward/mean"] for row in steps_of(run)) > 0, "answers of the tool lead to rewards"
    holding = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert not holding, "the value of a reference is in no file of the run"
    left = [process for process in psutil.process_iter(["cmdline"]) if "serve.py" in (process.info["cmdline"] or [])]
    assert not [one for one in left if os.path.realpath(one.cwd()) == str(tmp_path)], "each episode ended its program"
