"""Tools of real MCP servers, over standard input and output and over HTTP, and the effects of a server's failures."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.tasks.base import AgentTask, PromptTask, RewardResult, ScoreLater
from asyncrl_cli.tasks.load import load_task
from asyncrl_cli.tasks.mcp_tools import ServerLost
from asyncrl_cli.tasks.tools import ToolEnvironment
from asyncrl_cli.workers.episode_player import EpisodePlayer
from asyncrl_cli.workers.messages import Play
from tests.tasks.mcp_server import DOT
from tests.tasks.test_play import played, playing, policy, reply_with, run

pytestmark = pytest.mark.slow

SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO: dict[str, Any] = {"command": sys.executable, "args": [SERVER]}
RUNNING: dict[str, Any] = {"url": ""}
"""The server of the fixture ``url``."""
TASK = """
    from asyncrl_cli.tasks.tools import ToolTask

    def add_up(numbers: list[int]) -> int:
        return sum(numbers)

    class Sums(ToolTask):
        def tools(self, prompt):
            return [add_up]

        def judge(self, prompt, text):
            return float(text == prompt.fields["answer"])

    async def agent(prompt, model):
        return 0.0

    def ranked(prompt, responses):
        return [0.0 for _ in responses]
"""
PROMPT = Prompt("p", "1+2=", {"answer": "3"})


@contextmanager
def http_server() -> Iterator[str]:
    """Start a server for the duration of the block; yields its URL."""
    with subprocess.Popen([sys.executable, SERVER, "0"], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            address = next(found[0] for line in process.stderr if (found := re.search(r"http://127\S+", line)))
            yield f"{address}/mcp"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http_server() as url:
        yield url


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spec")
    (folder / "my_sums.py").write_text(textwrap.dedent(TASK))
    return folder


@pytest.fixture(scope="module")
def local(folder: Path) -> Any:
    """A task with a server's program."""
    return loaded(folder, "my_sums:Sums", local=STDIO | {"env": {"GIVEN": "yes"}})


def loaded(folder: Path, use: str = "exact", **servers: Any) -> Any:
    servers = {name: {"timeout_s": 300} | server for name, server in servers.items()}  # on a busy machine, too
    return load_task(TaskSpec.model_validate({"use": use, "tools": {"mcp": servers}}), folder, connect=True)


@pytest.fixture(scope="module")
def scored(folder: Path) -> Any:
    """A task with a reward, as an episode with a server's program."""
    return loaded(folder, "chain_sum", local=STDIO)


def environment(task: Any) -> ToolEnvironment:
    return task.environment(PROMPT)


def called(task: Any, *replies: Sequence[tuple[str, str]]) -> tuple[list[str], Any]:
    """Play an episode with these calls and the answer 3; returns the texts of all results, and the score."""
    answers = [*(reply_with(None, *calls) for calls in replies), reply_with("3")]
    result, sent = playing(environment(task), answers)
    return [one["content"] for one in sent[-1]["messages"] if one["role"] == "tool"], result


def test_tools_of_a_program_are_called_in_the_folder_of_the_spec(
    local: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOT_GIVEN", "secret")
    names = [tool["function"]["name"] for tool in environment(local).tools]
    assert {"add_up", "add", "count"} <= set(names)
    calls = [("add", '{"a": 1, "b": 2}'), ("add_up", '{"numbers": [1, 2]}'), ("picture", ""), ("surroundings", "{}")]
    texts, result = called(local, calls)
    assert texts[:3] == ["3", "3", "a\ndot\n[image]"]
    assert texts[3].split()[:3] == [folder.name, "yes", "None"]
    assert result.reward == 1.0
    assert result.metrics == {"tool_calls": 4.0, "tool_errors": 0.0}


def test_images_of_a_tool_are_images_for_a_model_that_sees_them(local: Any) -> None:
    answers = [reply_with(None, ("picture", "{}"), ("broken_picture", "{}")), reply_with("3")]
    result, sent = playing(environment(local), answers, max_images=1)
    shown, broken = (one["content"] for one in sent[-1]["messages"] if one["role"] == "tool")
    text, image = shown
    assert text == {"type": "text", "text": "a\ndot"}
    assert base64.b64decode(image["image_url"]["url"].partition(";base64,")[2]) == DOT
    assert broken.startswith("Error: ImageError: the image is not an image of a known format")
    assert result.metrics == {"tool_calls": 2.0, "tool_errors": 1.0}


def test_each_episode_has_its_own_process_and_ends_it(local: Any) -> None:
    first, _ = called(local, [("count", "{}")], [("count", "{}"), ("surroundings", "{}")])
    assert first[:2] == ["1", "2"]
    one, running = environment(local), []

    def close() -> None:
        running.append(programs())
        ToolEnvironment.close(one)
        running.append(programs())

    vars(one)["close"] = close
    _, sent = playing(one, [reply_with(None, ("count", "{}")), reply_with("3")])
    assert [message["content"] for message in sent[-1]["messages"] if message["role"] == "tool"] == ["1"]
    assert [len(found) for found in running] == [1, 0]


def programs() -> list[psutil.Process]:
    """The servers that this process has started, and that run."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # also of a zombie
            if SERVER in child.cmdline():
                found.append(child)
    return found


def test_tools_of_a_url_are_called_with_the_headers(folder: Path, url: str) -> None:
    task = loaded(folder, "my_sums:Sums", remote={"url": url, "headers": {"Authorization": "Bearer abc"}})
    texts, _ = called(task, [("token", "{}"), ("add", '{"a": 1, "b": 2}')])
    assert texts == ["Bearer abc", "3"]


@pytest.mark.parametrize("kind", ["http", pytest.param("stdio", marks=pytest.mark.rotating)])
def test_errors_and_missing_answers_go_to_the_policy(folder: Path, url: str, kind: str) -> None:
    server = {"url": url} if kind == "http" else STDIO
    # The HTTP server runs already; a program starts in seconds, on a busy machine in half a minute.
    task = loaded(folder, "my_sums:Sums", one=server | {"timeout_s": 3 if kind == "http" else 40})
    calls = [("add", '{"a": "x"}'), ("add", "not json"), ("add", "[1]"), ("slow", "{}"), ("add", '{"a": 1, "b": 2}')]
    texts, result = called(task, calls)
    assert [text.startswith("Error: ") for text in texts] == [True] * 4 + [False]
    assert "2 validation errors" in texts[0] and "JSON object" in texts[2]
    assert "the tool 'slow' of the MCP server 'one' did not answer within" in texts[3]
    assert result.metrics == {"tool_calls": 5.0, "tool_errors": 4.0}


def test_a_lost_program_fails_the_episode_with_the_cause(local: Any) -> None:
    with pytest.raises(ServerLost, match="MCP server 'local' cannot be used: MCPError: Connection closed"):
        called(local, [("end", "{}")])
    assert called(local, [("count", "{}")])[0] == ["1"], "the next episode starts the program again"


def test_a_lost_url_fails_the_episode_with_the_cause(folder: Path) -> None:
    with http_server() as url:
        task = loaded(folder, "my_sums:Sums", remote={"url": url})
        with pytest.raises(ServerLost, match="MCP server 'remote' cannot be used"):
            called(task, [("end", "{}")])
        with pytest.raises(ServerLost, match="ConnectError"):
            called(task, [("count", "{}")])


def test_an_episode_that_is_stopped_ends_its_program(scored: Any) -> None:
    pids: list[int] = []

    async def scene() -> Any:
        player = EpisodePlayer(scored, timeout_s=600)
        arrived, go = asyncio.Event(), asyncio.Event()

        async def answer(request: web.Request) -> web.Response:
            body = await request.json()
            texts = [one["content"] for one in body["messages"] if one["role"] == "tool"]
            if not texts:
                return web.json_response(reply_with(None, ("surroundings", "{}")))
            pids.append(int(texts[0].split()[-1]))
            arrived.set()
            await go.wait()
            return web.json_response(reply_with("3"))

        async with policy(answer) as access:
            playing = asyncio.create_task(player.play(1, Play(PROMPT, access)))
            await arrived.wait()
            player.cancel(1)
            played = await playing
            go.set()
        return played

    played = run(scene())
    assert isinstance(played.score, RewardFailure) and "it was cancelled" in played.score.reason
    assert not played.stuck
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_task_with_a_reward_becomes_an_episode(scored: Any, folder: Path) -> None:
    assert isinstance(scored, AgentTask) and isinstance(scored, PromptTask)
    assert scored.reward(*(scored.prompts("train", 1)[0], "#", True)) == 0.0
    plain = load_task(TaskSpec.model_validate({"use": "exact", "tools": {"mcp": {"local": STDIO}}}), folder)
    assert not isinstance(plain, AgentTask), "rewards are loaded without the servers"


def test_a_reply_that_calls_a_tool_is_not_scored_at_a_limit(scored: Any) -> None:
    call = reply_with("3", ("surroundings", "{}"))
    refused = {"error": {"message": "too many", "code": "max_calls_exceeded"}}
    assert played(scored, [call, refused], 400)[0] == RewardResult(0.0, {"tool_calls": 1.0, "tool_errors": 0.0})
    assert isinstance(played(scored, [call, reply_with("3")])[0], ScoreLater)


@pytest.mark.parametrize(
    ("use", "servers", "location", "says", "hint"),
    [
        ("exact", {"a": {"url": "http://127.0.0.1:9/mcp"}}, "a", "'a' cannot be used: ConnectError", "start it"),
        ("exact", {"a": {"command": "no-such-program"}}, "a", "No such file", "correct its command"),
        (
            "exact",
            {"a": {"command": sys.executable, "args": ["-c", "raise SystemExit('no key')"]}},
            "a",
            "it printed: no key",
            "correct its command",
        ),
        (
            "exact",
            {"a": {"command": sys.executable, "args": ["-c", "import time; time.sleep(60)"], "timeout_s": 0.5}},
            "a",
            "'a' did not list its tools within 0.5 s",
            "correct its command",
        ),
        ("exact", {"a": RUNNING, "b": RUNNING}, "b", "the tool 'add' is also a tool of 'a'", "allowed_tools"),
        ("exact", {"a": RUNNING | {"allowed_tools": ["ad"]}}, "a.allowed_tools", "no tool 'ad'", "did you mean `add`"),
        ("my_sums:agent", {"a": STDIO}, "", "plays its episodes itself", "ToolTask"),
        ("my_sums:ranked", {"a": STDIO}, "", "scores whole groups", "task with a reward"),
    ],
)
def test_servers_that_cannot_be_used_are_refused(
    folder: Path, url: str, use: str, servers: dict[str, Any], location: str, says: str, hint: str
) -> None:
    servers = {name: server | ({"url": url} if server.get("url") == "" else {}) for name, server in servers.items()}
    with pytest.raises(TaskError) as refused:
        loaded(folder, use, **servers)
    assert says in refused.value.message and hint in refused.value.hint
    assert refused.value.location == (f"task.tools.mcp.{location}" if location else "task.tools")


def test_a_tool_of_the_task_with_the_name_of_a_servers_tool_is_refused(folder: Path, url: str) -> None:
    (folder / "same_names.py").write_text(textwrap.dedent(TASK).replace("add_up", "add"))
    task = loaded(folder, "same_names:Sums", remote={"url": url})
    with pytest.raises(TaskError, match="two tools are named 'add'"):
        environment(task)
    assert loaded(folder, "same_names:Sums", remote={"url": url, "allowed_tools": ["count"]}).environment(PROMPT)
