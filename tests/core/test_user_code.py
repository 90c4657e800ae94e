"""User code that hangs or ends the process is reported with its line."""

from __future__ import annotations

import signal
import sys
import sysconfig
import threading
from pathlib import Path

import pytest

from asyncrl_cli.core.errors import ConfigError, TaskError
from asyncrl_cli.core.user_code import as_import, import_named, user_code


@pytest.mark.parametrize(
    "hang",
    [
        "while True: pass",
        "import time; time.sleep(600)",
        "import threading; threading.Event().wait()",
        "import time\nwhile True:\n    try: time.sleep(600)\n    except Exception: pass",
    ],
)
def test_an_import_that_hangs_is_stopped_and_named(tmp_path: Path, hang: str) -> None:
    (tmp_path / "hanging.py").write_text(f"# a module\n{hang}\n")
    notices: list[str] = []
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    with pytest.raises(ConfigError, match="importing the task took more than 0 s") as error:  # noqa: SIM117
        with user_code("importing the task", notices.append, limit_s=0.2):
            import_named("hanging:task", tmp_path, "task.use", "name a task")
    assert error.value.location.startswith(f"{tmp_path}/hanging.py:")
    assert error.value.exit_code == 2
    assert signal.getsignal(signal.SIGALRM) == handler
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (timer[0] > 0), "an outer timer continues"


def test_slow_code_is_reported_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl_cli.core.user_code.FIRST_NOTICE_S", 0.05)
    (tmp_path / "waiting.py").write_text("def wait(notices):\n    while not notices:\n        pass\n")
    notices: list[str] = []
    wait = import_named("waiting:wait", tmp_path, "task.use", "name a task")  # before the clock starts
    with user_code("opening the data", notices.append):
        wait(notices)
    assert notices[0].startswith("opening the data takes long: 0 s, now at ")
    assert f"{tmp_path}/waiting.py:" in notices[0]
    launcher = compile("while len(notices) < 2: pass", f"{sysconfig.get_path('scripts')}/asyncrl", "exec")
    with user_code("opening the data a.jsonl", notices.append):
        exec(launcher, {"notices": notices})
    assert f"now at {__file__}:" in notices[1], "the launcher of asyncrl is not the user's code"


@pytest.mark.parametrize("call", ["sys.exit(3)", "sys.exit()"])
def test_an_exit_is_an_error_with_its_line(tmp_path: Path, call: str) -> None:
    (tmp_path / "leaving.py").write_text(f"import sys\n\n{call}\n")
    with pytest.raises(ConfigError) as error, user_code("importing the task", print):
        import_named("leaving:task", tmp_path, "task.use", "name a task")
    assert error.value.location == f"{tmp_path}/leaving.py:3"
    assert error.value.message == f"importing the task called {call}"


def test_a_name_may_have_dots_and_one_that_is_missing_is_described(tmp_path: Path) -> None:
    (tmp_path / "naming.py").write_text("class Outer:\n    class Inner:\n        reward = 3\n")

    def named(target: str, folder: Path | None = tmp_path) -> object:
        return import_named(target, folder, "task.use", "name a task", TaskError)

    assert named("naming:Outer.Inner.reward") == 3
    for target, message, hint in (
        ("naming:Outer.Iner", r"module naming \(.*naming.py\) has no 'Outer.Iner'", "did you mean `Inner`?"),
        ("naming:absent", "has no 'absent'", "name a task"),
        ("absent_module.part:f", f"no module 'absent_module.part' in {tmp_path} or on Python's path", "absent_module/"),
    ):
        with pytest.raises(TaskError, match=message) as error:
            named(target)
        assert hint in error.value.hint and error.value.location == "task.use"
    with pytest.raises(TaskError, match="no module 'absent_module' on Python's path"):
        named("absent_module:f", None)


def test_other_errors_pass_and_other_threads_have_no_limit() -> None:
    with pytest.raises(KeyError), user_code("this", print):
        raise KeyError
    ended: list[bool] = []

    def work() -> None:
        with user_code("that", print, limit_s=1.0):
            ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended == [True]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("my_reward.py:reward", "my_reward:reward"),
        ("./rewards/mine.py:reward", "rewards.mine:reward"),
        ("my_reward.py", "my_reward:NAME"),
        ("my_reward.reward", "my_reward:reward"),
        ("package.module:Class.method", "package.module:Class.method"),
    ],
)
def test_names_of_files_have_a_form_for_imports(target: str, expected: str) -> None:
    assert as_import(target) == expected


@pytest.mark.parametrize(
    ("name", "library"),
    [("random.py", "Python's"), ("tokenizers.py", "the installed"), ("json/__init__.py", "Python's")],
)
def test_a_module_next_to_the_spec_that_hides_a_library_is_refused(tmp_path: Path, name: str, library: str) -> None:
    (tmp_path / "my_rewards.py").write_text("def reward(prompt, response): return 1.0\n")
    (tmp_path / "test.py").touch()
    (tmp_path / "agents.py").touch()  # a package of that name may be installed, but nothing here imports it
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    module = name.partition(".")[0].partition("/")[0]
    with pytest.raises(ConfigError, match=rf"hides {library} module `{module}`") as refused:
        import_named("my_rewards:reward", tmp_path, location="task.use", hint="")
    assert refused.value.location == str(tmp_path / name.partition("/")[0]) and "rename" in refused.value.hint
    assert str(tmp_path) not in sys.path


def test_a_file_in_place_of_a_module_is_refused_with_the_right_form(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        import_named("monitor.py:Mine", tmp_path, "tracking.monitors.0", "")
    assert refused.value.hint == "write it like an import, as `monitor:Mine`"
