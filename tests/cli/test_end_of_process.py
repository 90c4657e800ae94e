"""The end of a command's process: Python does not finalize torch; everything else is the same as without torch."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROCESS = """
    import atexit, os, sys, threading, time, types

    class Witness:
        def __del__(self, write=os.write):
            write(1, b"dismantled\\n")

    sys.modules[sys.argv[1]] = types.ModuleType("stand-in")
    sys.argv = ["asyncrl", *sys.argv[2:]]
    witness = Witness()

    from asyncrl_cli.cli import app

    def main(main=app.main):
        atexit.register(print, "handled")
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
        main()

    app.main = main
    app.console_script()
"""


def process(module: str, *arguments: str, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), module, *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run(command, cwd=cwd, text=True, check=False, timeout=300, **streams)  # type: ignore[call-overload,no-any-return]


def order(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The order of endings. The command's output may come before or after the thread's."""
    return [line for line in done.stdout.splitlines() if line in ("thread", "handled", "dismantled")]


@pytest.mark.parametrize(
    ("arguments", "code"), [(("--version",), 0), (("validate-spec", "none.yaml"), 2), (("no-such-command",), 2)]
)
def test_threads_and_exit_handlers_end_before_the_process_does(
    tmp_path: Path, arguments: tuple[str, ...], code: int
) -> None:
    done = process("torch", *arguments, cwd=tmp_path)
    assert done.returncode == code, done
    assert order(done) == ["thread", "handled"]
    assert bool(done.stderr) == bool(code), "the error is printed"


def test_without_torch_python_ends_by_itself(tmp_path: Path) -> None:
    assert order(process("another", "--version", cwd=tmp_path)) == ["thread", "handled", "dismantled"]


def test_output_that_cannot_be_written_is_reported_as_without_torch(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        codes = {process(module, "--version", cwd=tmp_path, stdout=full).returncode for module in ("torch", "another")}
    assert len(codes) == 1 and codes != {0}
