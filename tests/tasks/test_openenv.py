"""The template `openenv` with a real OpenEnv server, in a separate virtual environment."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.load import load_one
from tests.e2e.gateway.installed import AGENTS
from tests.tasks.test_play import REFUSED, playing, reply_with

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "templates/openenv"
PROGRAMS = AGENTS / "openenv/bin"
LIMIT = {"error": REFUSED["error"] | {"code": "max_calls_exceeded"}}
needs_server = pytest.mark.skipif(not PROGRAMS.exists(), reason="openenv is not installed: `make agents` installs it")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("openenv")
    subprocess.run([PROGRAMS / "openenv", "init", "echo_env"], cwd=folder, check=True, capture_output=True)
    program = [PROGRAMS / "python", ROOT / "tests/tasks/openenv_server.py", folder]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            yield next(found[0] for line in server.stderr if (found := re.search(r"http://127\S+", line)))
        finally:
            server.kill()


def loaded(url: str, **options: Any) -> Any:
    return load_one("openenv_client:OpenEnv", {"url": url, **options}, TEMPLATE)


def act(arguments: str) -> dict[str, Any]:
    return reply_with(None, ("act", arguments))


@pytest.mark.rotating
@needs_server
def test_replies_are_text_actions_of_openenvs_echo_environment(url: str) -> None:
    task = loaded(f"{url}/echo", observation="echoed_message", instructions="Be long.")
    result, sent = playing(
        task.environment(Prompt("p", "")), [reply_with("four"), reply_with("more words"), LIMIT], 400
    )
    assert result.reward == pytest.approx(1.4)
    assert "tools" not in sent[0]
    assert [(one["role"], one["content"]) for one in sent[-1]["messages"]] == [
        ("system", "Be long."),
        ("user", "Echo Env environment ready!"),
        ("assistant", "four"),
        ("user", "four"),
        ("assistant", "more words"),
        ("user", "more words"),
    ]
    shown, _ = playing(loaded(f"{url}/echo").environment(Prompt("p", "")), [LIMIT], 400), None
    assert '"message_length": 0' in shown[1][0]["messages"][0]["content"], "without a field all of them are shown"


@needs_server
def test_actions_with_several_fields_are_calls_until_the_environment_is_done(url: str) -> None:
    task = loaded(f"{url}/count")
    rows = [task.prompts(split, 3)[2] for split in ("train", "eval")]
    assert [row.fields["seed"] for row in rows] == [2, 2**30 + 2]
    assert all(row.content for row in rows), "a start refuses empty prompts"
    replies = [act('{"many": 1}'), act('{"many": "all"}'), act("[]"), reply_with("1"), act('{"many": 1, "why": "end"}')]
    result, sent = playing(task.environment(rows[0]), replies)
    assert (result.reward, result.metrics) == (1.0, {"refused_actions": 3.0})
    (tool,) = sent[0]["tools"]
    assert tool["function"]["parameters"]["required"] == ["many"]
    assert set(tool["function"]["parameters"]["properties"]) == {"many", "why"}
    texts = [(one["role"], one["content"]) for one in sent[-1]["messages"] if one["role"] != "assistant"]
    assert texts[:2] == [("user", '{"left": 2}'), ("tool", '{"left": 1}')]
    assert "valid integer" in texts[2][1] and "call the tool `act` once" in texts[3][1]
    assert texts[4][0] == "user" and texts[4][1].startswith("Error: ")


@needs_server
def test_a_rows_columns_are_arguments_of_reset_and_its_prompt_is_shown_first(url: str) -> None:
    row = Prompt("p", "Take all.", {"seed": 1, "more": 4})
    _, sent = playing(loaded(f"{url}/count").environment(row), [LIMIT], 400)
    assert [one["content"] for one in sent[0]["messages"]] == ["Take all.", '{"left": 5}']


@needs_server
def test_each_episode_frees_its_session_and_failures_have_their_cause(url: str) -> None:
    task = loaded(f"{url}/count")
    row = Prompt("p", "", {"seed": 1})
    closed = int(urlopen(f"{url}/closed").read())
    for number in range(1, 4):  # the server has room for one
        assert playing(task.environment(row), [act('{"many": 1}')])[0].reward == 0.5
        assert int(urlopen(f"{url}/closed").read()) == closed + number, "it is closed before the next begins"
    with pytest.raises(RuntimeError, match="EXECUTION_ERROR: not so many"):
        playing(task.environment(row), [act('{"many": 9}')])
    with pytest.raises(RuntimeError, match="done before the first action"):
        playing(task.environment(Prompt("p", "", {"seed": 0})), [])
    with pytest.raises(TaskError) as refused:
        loaded(f"{url}/count", observation="lef")
    assert refused.value.location == "task.options.observation" and "left" in refused.value.hint


@needs_server
def test_a_full_server_says_so(url: str) -> None:
    task = loaded(f"{url}/count")
    row = Prompt("p", "", {"seed": 1})

    class Second:
        """Begins another episode while the first is open."""

        def __init__(self) -> None:
            self.first, self.second = task.environment(row), task.environment(row)
            self.tools = self.first.tools

        def reset(self) -> Any:
            self.first.reset()
            return self.second.reset()

        def step(self, reply: Any) -> Any: ...

        def close(self) -> None:
            self.first.close()
            self.second.close()

    with pytest.raises(RuntimeError, match=r"CAPACITY_REACHED: .* \(lower task.episode.concurrency\)"):
        playing(Second(), [])
    assert playing(task.environment(row), [act('{"many": 1}')])[0].reward == 0.5


def test_without_a_server_the_start_is_refused() -> None:
    with pytest.raises(TaskError, match=r"no OpenEnv server answers at http://127\.0\.0\.1:9: URLError") as refused:
        loaded("http://127.0.0.1:9")
    assert refused.value.location == "task.options.url"
