"""Code that nobody has read can do little, and its tests say what it is worth."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.tasks.matching import MissingField
from asyncrl_cli.tasks.sandbox import Check, Limits, run
from asyncrl_cli.tasks.unit_tests import UnitTests, code_in

LIMITS = Limits(time_s=20.0, memory_mb=512, disk_mb=16, processes=16)
SHORT = Limits(time_s=1.0, memory_mb=512, disk_mb=16, processes=16)
NO_NAMESPACES = ["unshare", "-U", "-r", "sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"', "sh"]
"""Runs a command where no namespaces can be made, as in most containers."""


def passes(code: str, *tests: str, limits: Limits = LIMITS) -> list[bool]:
    return run(code, [Check(test) for test in tests or ("assert f() == 1",)], limits)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    before = psutil.Process().children(recursive=True)
    yield
    assert [process for process in psutil.Process().children(recursive=True) if process not in before] == []


def test_tests_pass_or_fail_each_for_itself() -> None:
    tests = ("assert f() == 1", "assert f() == 2", "f(3)", "import sys; sys.exit(0)", "assert f.__name__ == 'f'")
    assert passes("def f(): return 1", *tests) == [True, False, False, False, True]
    assert passes("def f(: return 1") == [False]
    assert passes("raise ValueError") == [False]
    assert passes("import os; os._exit(0)") == [False], "to leave is not to pass"
    assert passes("print('x' * 10**7)\ndef f(): return 1") == [True]


def test_there_is_no_network() -> None:
    with __import__("socket").create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)\ndef f(): return 1"
        assert passes(code) == [False]
        reached = []
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            reached.append(server.accept())


def test_files_are_its_own_and_bounded(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    code = f"""
import os, tempfile
outside = []
for path in ({str(tmp_path / "new")!r}, {str(tmp_path / "mine")!r}, os.path.expanduser("~root/new"), "/dev/shm/new"):
    try:
        open(path, "w").write("x")
        outside.append(path)
    except OSError:
        pass
written = 0
try:
    while written < 2**30:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(b"x" * 2**20)
        written += 2**20
except OSError:
    pass
"""
    # What is hidden from it may look writable; it is nobody else's.
    assert passes(code, "assert 8 * 2**20 < written < 17 * 2**20") == [True]
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "new").exists() and not Path("/dev/shm/new").exists()


def test_it_sees_no_environment_and_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    tests = (
        "assert 'SECRET' not in os.environ and 'ASYNCRL' not in str(os.environ)",
        "assert all(int(name) < 10 for name in os.listdir('/proc') if name.isdigit())",
        f"os.kill({os.getpid()}, 0)",
    )
    assert passes("import os", *tests) == [True, True, False]


@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(600)",
        "while True: pass",
        "x = bytearray(2**31)",
        "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
        "import os\nwhile True: os.fork()",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(600,)).start()",
        "import os, signal\nfor number in range(1, 30):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except OSError: pass\nimport time; time.sleep(600)",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        import time; time.sleep(600)\n    os._exit(0)\nos.wait()\nraise ValueError",
    ],
    ids=[
        "sleeps",
        "is busy",
        "takes memory",
        "holds the lock",
        "forks",
        "starts threads",
        "ignores",
        "leaves a daemon",
    ],
)
def test_what_it_could_use_up_is_bounded(code: str) -> None:
    before = {process.pid for process in psutil.process_iter()}
    assert passes(code + "\ndef f(): return 1", limits=SHORT) == [False]
    left = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in before]
    assert not [process for process in left if "sandbox_runner" in str(process.info["cmdline"])]


def test_it_ends_with_its_owner() -> None:
    code = "import time; time.sleep(600)"
    script = f"from asyncrl_cli.tasks.sandbox import *; run({code!r}, [Check('')], Limits(time_s=600))"
    owner = subprocess.Popen([sys.executable, "-c", script])
    started: list[psutil.Process] = []
    while not any("sandbox_runner" in " ".join(process.cmdline()) for process in started):
        started = psutil.Process(owner.pid).children(recursive=True)
    owner.kill()
    owner.wait()
    assert psutil.wait_procs(started, 20)[1] == []


@pytest.mark.skipif(
    subprocess.run([*NO_NAMESPACES, "true"], capture_output=True, check=False).returncode != 0,
    reason="no namespaces to take away",
)
def test_without_namespaces_hooks_of_python_guard_it(tmp_path: Path) -> None:
    script = f"""
from asyncrl_cli.tasks.sandbox import *
def passes(code): return run(code, [Check("")], Limits(time_s=20.0))[0]
assert passes("import tempfile; tempfile.TemporaryFile().write(b'x')")
assert passes("import numpy")
assert not passes("import socket; socket.socket()")
assert not passes("import subprocess; subprocess.run(['true'])")
assert not passes("open({str(tmp_path / "new")!r}, 'w')")
assert not passes("import os; os.mkdir({str(tmp_path / "new")!r})")
assert not passes("import os; os.fork()")
"""
    command = [*NO_NAMESPACES, sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "no namespaces" in result.stderr
    assert not (tmp_path / "new").exists()


def test_many_at_once_keep_apart() -> None:
    results: dict[int, list[bool]] = {}

    def one(number: int) -> None:
        results[number] = passes(f"open('mine', 'x').write('{number}')", f"assert open('mine').read() == '{number}'")

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [True] for number in range(4)}


# -- the task


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```\nor\n```py\nx = 2\n```", "x = 2\n"),
        ("  ```python\nx = 1\n  ```", "x = 1\n"),
        ("```python\nx = 1", "```python\nx = 1"),
    ],
)
def test_the_last_fenced_block_is_the_code(response: str, code: str) -> None:
    assert code_in(response) == code


FUNCTIONS = "def test_one(): assert f(1) == 2\ndef test_two(): assert f(2) == 3\ndef helper(): assert False"


@pytest.mark.parametrize(
    ("tests", "partial", "reward", "share"),
    [
        (FUNCTIONS, False, 1.0, 1.0),
        (["assert f(1) == 2", "assert f(2) == 4"], False, 0.0, 0.5),
        (["assert f(1) == 2", "assert f(2) == 4"], True, 0.5, 0.5),
        ("assert f(1) == 2\nassert f(2) == 4", True, 0.0, 0.0),
    ],
)
def test_rewards(tests: Any, partial: bool, reward: float, share: float) -> None:
    response = "```python\ndef f(x):\n    return x + 1\n```"
    scored = UnitTests(partial=partial).reward(Prompt("row", "?", {"tests": tests}), response, True)
    assert (scored.reward, scored.metrics) == (reward, {"tests_passed": share})


def test_mistakes_in_a_row_are_no_fault_of_the_response() -> None:
    task = UnitTests()
    with pytest.raises(MissingField):
        task.reward(Prompt("row", "?"), "x = 1", True)
    with pytest.raises(SyntaxError):
        task.reward(Prompt("row", "?", {"tests": "assert ("}), "x = 1", True)
    assert task.reward(Prompt("row", "?", {"tests": "assert True"}), "I do not know", True).reward == 0.0
