"""Settings of all tests: signals have their default handlers, Hypothesis has no deadline, and no process remains."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import inspect
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
from hypothesis import settings

from asyncrl_cli.system.process_tree import PR_SET_CHILD_SUBREAPER

# A background shell makes processes ignore SIGINT, and nohup SIGHUP. Processes that tests start and interrupt would
# inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A slow example on a busy machine is not a failure.
settings.register_profile("asyncrl", deadline=None)
settings.register_profile("rotate", deadline=None, max_examples=40)
settings.load_profile("asyncrl")

ASYNC_LIMIT_S = 300.0
"""Seconds that a coroutine test may take. Without a limit, a test that waits for an event would block its process."""
SESSION = "ASYNCRL_TEST_SESSION"
"""Environment variable that child processes inherit; its value is different in each pytest (xdist) process."""
GRACE_S = 120.0
"""Seconds that leftover processes get to end."""
LIBRARIES = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", b"torch/_inductor/compile_worker")
"""Library processes that end with the pytest process."""
LONG = (
    "e2e/faults/test_killed_parts.py",
    "e2e/test_quickstart.py",
    "e2e/test_runs.py",
    "e2e/gateway/test_episodes.py",
    "e2e/gateway/test_serve.py",
    "e2e/saved_model/test_saved_model.py",
    "e2e/test_weights.py",
    "rollout/test_segments.py",
    "train/test_engine.py",
    "train/test_trainer_checkpoints.py",
    "weights/test_engine_models.py",
    "train/test_zero_engines.py",
    "train/test_image_engine.py",
    "train/test_adapters_and_references.py",
    "train/test_expert_parallel.py",
)
"""Files that take between half a minute and three minutes, the longest first, except those that rotate."""


ROTATING = 2
"""Files with tests marked `rotating` that each part of `make test` runs."""
DRAWN = pytest.StashKey[set[str]]()


# Collecting the tests imports torch and transformers; the garbage collector would take a third of it (decision 0044).
gc.disable()


def pytest_collection_finish() -> None:
    """Enable the garbage collector, and let torch use one thread in pytest's processes."""
    gc.freeze()  # otherwise each full collection looks at all objects of all imported libraries
    gc.enable()
    if torch := sys.modules.get("torch"):
        # There are more processes than cores, so waiting threads would take more time than the work (decision 0041).
        torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rotate", action="store_true", help="of the tests marked `rotating`, run only the commit's")


def pytest_configure(config: pytest.Config) -> None:
    """With ``--rotate``, try fewer examples in tests that do not set their number."""
    if config.getoption("rotate"):
        settings.load_profile("rotate")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file if `-m "not a and not b"` excludes all of it: imports take most of `make test-fast`."""
    excluded = re.fullmatch(r"not \w+(?: and not \w+)*", config.option.markexpr)
    if excluded is None or collection_path.suffix != ".py":
        return None
    marks = "|".join(re.findall(r"not (\w+)", excluded[0]))
    whole_file = re.search(rf"^pytestmark = .*pytest\.mark\.(?:{marks})\b", collection_path.read_text(), re.MULTILINE)
    return True if whole_file else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Move long files to the front: a process takes a whole file, and none should begin a long file at the end.

    With ``--rotate``, deselect the rotating tests that the commit does not draw; the drawn files are long.
    """
    order = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}
    if config.getoption("rotate"):
        rotating = [item for item in items if item.get_closest_marker("rotating")]
        drawn = drawn_files({file_of(item) for item in rotating}, commit())
        config.stash[DRAWN] = drawn
        left = {item for item in rotating if file_of(item) not in drawn}
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
        order = dict.fromkeys((item.path for item in items if file_of(item) in drawn), -1) | order
    items.sort(key=lambda item: order.get(item.path, len(order)))


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def drawn_files(names: Collection[str], commit: str) -> set[str]:
    """The files with rotating tests that run at a commit: different ones for each commit, the same in every process."""
    return set(random.Random(commit).sample(sorted(names), min(ROTATING, len(names))))


def commit() -> str:
    """The checkout's commit, or "" without git."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    with suppress(OSError):
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return ""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in its own event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def bounded() -> None:
        async with asyncio.timeout(ASYNC_LIMIT_S):
            await pyfuncitem.function(**arguments)

    asyncio.run(bounded())
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print each reason for skipped tests once, because a single reason may skip hundreds of tests."""
    # The last part of `longrepr` is the reason, after the file and the line.
    reasons = Counter(str(report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
    if drawn := terminalreporter.config.stash.get(DRAWN, None):
        terminalreporter.write_line(f"rotating tests that this commit draws: {', '.join(sorted(drawn))}")


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A temporary folder for this process only: suites and processes that run side by side share no file, and Ray finds
    no cluster of another one."""
    tmp_path_factory.getbasetemp()  # before the patch: pytest keeps its own folders, to be examined after a failure
    folder = tempfile.mkdtemp(prefix="t-")  # a short name: the paths of Ray's sockets have a maximum length
    os.chmod(folder, 0o1777)  # some tests become another user
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield
    # After multiprocessing has removed its own folder in it (priority -100). A process that has just been killed may
    # still write, so errors are ignored.
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)


@pytest.fixture(scope="module", autouse=True)
def orphans_are_not_adopted() -> Iterator[None]:
    """A file's tests may make pytest's process adopt orphans. In later files it would keep them as zombies."""
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)


@pytest.fixture(scope="module", autouse=True)
def user_modules_are_forgotten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A file's tests import modules from their folders. Those of later files may have the same name."""
    before = set(sys.modules)
    yield
    temporary = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(temporary):
            del sys.modules[name]


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Fail if a process outlives the tests. The first session fixture to start is the last one to end."""
    os.environ[SESSION] = token = secrets.token_hex(8)
    yield
    entry, deadline = f"{SESSION}={token}".encode(), time.monotonic() + GRACE_S
    while (left := processes_with(entry)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, "tests left processes behind:\n" + "\n".join(left)


def processes_with(entry: bytes) -> list[str]:
    """Other processes with this entry in their environment: pid, command line, and the test that started them."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
            command = (process / "cmdline").read_bytes()
        except OSError:  # it belongs to another user, or has ended
            continue
        if entry in environment and not any(library in command for library in LIBRARIES):
            tests = [value for value in environment if value.startswith(b"PYTEST_CURRENT_TEST=")]
            shown = b" ".join([*command.split(b"\0"), *tests]).decode(errors="replace")
            found.append(f"{process.name} {shown}")
    return found


@contextmanager
def not_writable(folder: Path) -> Iterator[None]:
    """Make a folder read-only during the block. Root may write anywhere, so the process changes its user."""
    mode, me = folder.stat().st_mode, os.geteuid()
    folder.chmod(0o555)
    try:
        if me == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(me)
        folder.chmod(mode)


@pytest.fixture
def archive() -> Iterator[Path]:
    """A folder that every user may enter."""
    folder = Path(tempfile.mkdtemp(prefix="archive-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
