"""Commands as agents: their input, their rewards, and no process that remains."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.system.process_tree import adopt_orphans
from asyncrl_cli.tasks.base import GIVEN_PYTHONPATH, SPEC_FOLDER, AgentTask, ModelAccess, RewardResult
from asyncrl_cli.tasks.ready.command import Command, CommandFailed

pytestmark = pytest.mark.slow

PROMPT = Prompt("row/1", "What is it?", {"answer": 42})
ACCESS = ModelAccess("http://127.0.0.1:9/sessions/3-1/v1", "key", "policy", "3-1")


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def play(command: Any, prompt: Prompt = PROMPT, **options: Any) -> Any:
    return run(Command(command, **options).run(prompt, ACCESS))


def python(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


def test_a_command_finds_policy_and_prompt_in_its_environment(tmp_path: Path) -> None:
    assert isinstance(Command("true"), AgentTask)
    names = (
        *("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "ASYNCRL_ROLLOUT"),
        *("ASYNCRL_PROMPT", "ASYNCRL_PROMPT_FILE", "ASYNCRL_SCRATCH", "OWN"),
    )
    seen = tmp_path / "seen.json"
    code = (
        "import json, os; row = open(os.environ['ASYNCRL_PROMPT_FILE']).read();"
        f"found = [[os.environ[name] for name in {names!r}], row, os.getcwd(), os.listdir()];"
        f"json.dump(found, open({str(seen)!r}, 'w'));"
        "print(1)"
    )
    assert play(python(code), env={"OWN": "mine"}) == 1.0
    (url, key, model, rollout_id, row, _, scratch, own), in_file, cwd, found = json.loads(seen.read_text())
    assert (url, key, model, rollout_id, own) == (ACCESS.base_url, "key", "policy", "3-1", "mine")
    assert json.loads(row) == {"uid": "row/1", "prompt": "What is it?", "answer": 42}
    assert in_file == row
    assert found == [], "an empty folder to work in"
    assert not Path(cwd).exists(), "the folder is removed after the episode"
    assert not Path(scratch).exists()


@pytest.mark.parametrize(("given", "seen"), [("/mine", "/spec:/mine"), ("", "/spec")])
def test_the_workers_module_path_is_not_the_commands(
    given: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It contains the standard library of this Python, and a program may use another version."""
    monkeypatch.setenv(SPEC_FOLDER, "/spec")
    monkeypatch.setenv(GIVEN_PYTHONPATH, given)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    assert play(f"printenv PYTHONPATH > {tmp_path / 'path'}; echo 1") == 1.0
    assert (tmp_path / "path").read_text().strip() == seen


def test_variables_are_texts() -> None:
    with pytest.raises(TaskError, match="is not a mapping of texts") as raised:
        Command("true", env={"DEBUG": 1})  # type: ignore[dict-item]
    assert raised.value.location == "task.options.env" and "in quotes" in (raised.value.hint or "")


def test_a_prompt_too_long_for_the_environment_is_in_the_file() -> None:
    code = "import json, os; print(len(json.load(open(os.environ['ASYNCRL_PROMPT_FILE']))['prompt']))"
    assert play(python(code), Prompt("long", "x" * 500_000)) == 500_000.0


@pytest.mark.parametrize(
    ("printed", "reward"),
    [
        ("0.5", 0.5),
        ("a lot of talk\n-3\n\n", -3.0),
        ('{"reward": 1, "metrics": {"turns": 3}}', RewardResult(1.0, {"turns": 3})),
        ("x" * 3_000_000 + "\n1", 1.0),
    ],
)
def test_the_last_line_is_the_reward(printed: str, reward: object, tmp_path: Path) -> None:
    (tmp_path / "out").write_text(printed)
    assert play(f"cat {tmp_path / 'out'}; head -c 3000000 /dev/zero >&2") == reward


def test_endless_errors_of_a_command_take_no_disk() -> None:
    written_kb = 'yes | head -c 100000000 >&2; du -sk "$ASYNCRL_SCRATCH" | cut -f 1'
    assert play(written_kb) < 1000
    with pytest.raises(CommandFailed, match="status 3: the last line"):
        play("yes | head -c 1000000 >&2; echo the last line >&2; exit 3")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("echo thinking; echo 'no such model' >&2; exit 3", "it ended with status 3: no such model"),
        ("exit 3", "it ended with status 3: it printed nothing"),
        ("kill -9 $$", "it ended with status 137"),
        ("echo done", "the last line that it printed is not a reward .*'done'"),
        ("true", "not a reward"),
        ("""echo '{"score": 1}'""", "not a reward"),
    ],
)
def test_a_command_without_a_reward_fails(command: str, says: str) -> None:
    with pytest.raises(CommandFailed, match=says):
        play(command)


def test_a_function_can_score_the_last_reply_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verifier_of_command.py").write_text(
        "def right(row, text):\n    return float(str(row['answer']) in text)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = Command("echo whatever", reward="verifier_of_command:right")
    assert run(task.run(PROMPT, ACCESS)) is None
    assert [task.reward(PROMPT, text, True) for text in ("it is 42", "43")] == [1.0, 0.0]
    with pytest.raises(TaskError, match=r"module verifier_of_command .* has no 'absent'"):
        Command("true", reward="verifier_of_command:absent")


LEAVES = """
sleep 600 & echo $! >> {pids}
setsid sleep 600 & echo $! >> {pids}
(setsid sleep 600 & echo $! >> {pids}) &
env -i sleep 600 & echo $! >> {pids}
setsid env -i sleep 600 & echo $! >> {pids}
(cd / && setsid --fork env -i sh -c 'echo $$ >> {pids}; exec sleep 600') &
while [ $(wc -l < {pids}) -lt 6 ]; do :; done
"""


@pytest.mark.parametrize("end", ["echo 1", "exit 1", "sleep 600"])
async def test_no_process_of_a_command_is_left(tmp_path: Path, end: str) -> None:
    adopt_orphans()  # as in the process that starts commands
    pids = tmp_path / "pids"
    task = Command(LEAVES.format(pids=pids) + f"touch {tmp_path / 'ready'}; {end}")
    playing = asyncio.create_task(task.run(PROMPT, ACCESS))
    while not (tmp_path / "ready").exists():
        await asyncio.sleep(0.01)
    if end == "sleep 600":
        playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 6
    assert [pid for pid in started if psutil.pid_exists(pid)] == []
